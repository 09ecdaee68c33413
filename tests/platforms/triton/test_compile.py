"""What compile_all compiles is all there is: a kernel that it does not know would reach a device unseen."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

triton = pytest.importorskip("triton")

import headrace.platforms.triton as home  # noqa: E402
from headrace.platforms.triton import compile_all, targets  # noqa: E402

KERNELS = "_kernel"  # functions with this ending are launched; the others are called by them


def launched() -> set[str]:
    found = set()
    for module in pkgutil.iter_modules(home.__path__):
        for name, value in vars(importlib.import_module(f"{home.__name__}.{module.name}")).items():
            if isinstance(value, triton.JITFunction) and name.endswith(KERNELS):
                found.add(name)
    return found


def test_every_kernel_is_compiled():
    """For some architecture: not all kernels serve on each."""
    runtimes = [targets.target(arch).runtime for arch in ("sm_80", "sm_90", "sm_100", "gfx942")]
    compiled = {v.kernel.__name__ for runtime in runtimes for v in compile_all.variants(runtime)}
    assert compiled == launched()


def test_spills_beyond_the_bound_fail(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    used = targets.Resources(255, 400, 1024)
    monkeypatch.setattr(compile_all, "compile_variant", lambda variant, target: used)
    arguments = ["compile_all", "--quiet", "--arch", "sm_90", "--only", "row bf16 960x576"]
    for most, code, said in ((399, 1, "too much"), (400, 0, "0 beyond the bounds")):
        monkeypatch.setattr("sys.argv", [*arguments, "--most-spills", str(most)])
        assert compile_all.main() == code
        assert said in capsys.readouterr().out
