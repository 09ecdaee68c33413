"""What is installed, read from the files of distributions: nothing is imported, torch included."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path


def version_of(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, else ""."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def torch_built_for(toolkit: str) -> str:
    """The version of the toolkit ("cuda", "hip", "xpu") that the installed torch was built for; "" without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    match = re.search(rf"^{toolkit}\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""
