"""A few of the shared kernels compiled for AMD's devices, with none here. All of them, for one architecture:

python -m headrace.platforms.triton.compile_all --arch gfx942
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.amd.compiler")

from headrace.platforms.rocm.platform import RocmPlatform
from headrace.platforms.triton import compile_all, targets

NAMES = ("decode bf16 32/8x64", "row bf16 960x576", "rms_norm_kernel bf16 576")


@pytest.mark.slow
@pytest.mark.parametrize("arch", RocmPlatform.known_archs())
def test_kernels(arch, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = targets.target(arch)
    assert target.compiler.warp_size == (64 if arch.startswith("gfx9") else 32)
    found = {v.name: v for v in compile_all.variants(target.runtime) if v.name in NAMES}
    assert set(found) == set(NAMES)
    for name, variant in found.items():
        used = compile_all.compile_variant(variant, target)
        assert used.registers and used.spills <= target.most_spills, name
        assert used.shared <= target.shared and not used.missing, name


def test_products_without_matrix_instructions_are_noticed():
    dot = "tt.dot %a, %b, %c : tensor<16x64xbf16> * tensor<64x64xbf16> -> tensor<16x64xf32>"
    plain = "v_fma_f32 v0, v1, v2, v3\n    .vgpr_count:     12\n    .vgpr_spill_count: 3\n"
    made = SimpleNamespace(asm={"ttir": dot, "amdgcn": plain}, metadata=SimpleNamespace(shared=64))
    for features, missing in (({"mfma"}, "v_mfma"), ({"wmma"}, "v_wmma"), (set(), "")):
        used = targets._of_amdgcn(made, frozenset(features))
        assert used == targets.Resources(12, 12, 64, missing)
    made.asm["amdgcn"] = "v_mfma_f32_16x16x16_bf16 a, b, c, d\n"
    assert not targets._of_amdgcn(made, frozenset({"mfma"})).missing


def test_remembered_launches_know_large_memory(monkeypatch):
    """A kernel that was compiled for memory below 2 GiB must not be launched for more."""
    import torch

    from headrace.platforms.triton import launch

    compiled, runs = [], []

    class Kernel:
        params = ()
        arg_names = ("x",)
        __name__ = "kernel"

        def __getitem__(self, _grid):
            def run(x):
                compiled.append(x.untyped_storage().nbytes())
                return SimpleNamespace(run=lambda *_: runs.append(1), function=0, packed_metadata=0)

            return run

    active = SimpleNamespace(
        get_current_stream=lambda _: 0, get_current_target=lambda: SimpleNamespace(backend="hip")
    )
    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=active))
    launcher = launch.Launcher(Kernel(), {})
    small = torch.empty(16, dtype=torch.uint8)
    large = torch.empty(2**31, dtype=torch.uint8)[:16]  # untouched pages cost nothing
    for _ in range(3):
        launcher((1, 1, 1), small)
    assert len(compiled) == 2 and len(runs) == 1  # the first one tells how arguments are divided
    launcher((1, 1, 1), large)
    assert len(compiled) == 3 and len(runs) == 1
    launcher((1, 1, 1), large)
    launcher((1, 1, 1), small)
    assert len(compiled) == 3 and len(runs) == 3
