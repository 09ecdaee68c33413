"""The builds of the native kernel library: one for each instruction set, the best one that is here is taken."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
FEATURE = "native_kernels"  # in DeviceInfo.features when a build for the CPU is installed

# Strongest first: build -> the features (see hardware.FEATURES) without which it would crash. setup.py compiles them.
BUILDS: dict[str, frozenset[str]] = {
    "amx": frozenset({"avx512", "avx512_vnni", "avx512_bf16", "amx_bf16", "f16c", "fma", "avx2"}),
    "avx512_bf16": frozenset({"avx512", "avx512_vnni", "avx512_bf16", "f16c", "fma", "avx2"}),
    "avx512": frozenset({"avx512", "avx512_vnni", "f16c", "fma", "avx2"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "neon_dot": frozenset({"neon", "dotprod"}),
    "neon": frozenset({"neon"}),
    "portable": frozenset(),
}
_ARM = frozenset({"neon", "neon_dot"})


def fitting(features: frozenset[str]) -> list[str]:
    """Builds that run on a CPU with these features, strongest first."""
    arm = "neon" in features
    return [
        name
        for name, needed in BUILDS.items()
        if needed <= features and (name == "portable" or (name in _ARM) == arm)
    ]


def native_build(features: frozenset[str], folder: Path = HERE) -> Path | None:
    """The library file to load on a CPU with these features; None when none of the fitting ones was built."""
    for name in fitting(features):
        for path in sorted(folder.glob(f"_native_{name}.*so")):
            return path
    return None
