"""AMD's launch options: what every device can have, whatever the kernel."""

from __future__ import annotations

import pytest

from headrace.platforms.queries import AttentionQuery, ExpertsQuery, NormQuery
from headrace.platforms.rocm.platform import RocmPlatform
from headrace.platforms.rocm.tuning import MOST_THREADS, kernel_options

FEATURES = {a: RocmPlatform.describe(a).features for a in RocmPlatform.known_archs()}
LAUNCH = {"num_warps": 16, "num_stages": 4}


@pytest.mark.parametrize("arch", FEATURES)
@pytest.mark.parametrize("warps", [1, 2, 4, 16, 32])
def test_a_workgroup_has_at_most_1024_threads(arch, warps):
    lanes = 64 if "wave64" in FEATURES[arch] else 32
    query = NormQuery(64, "bfloat16")
    chosen = kernel_options(FEATURES[arch], "rms_norm", query, {"num_warps": warps})
    assert chosen["num_warps"] >= 1 and chosen["num_warps"] * lanes <= MOST_THREADS
    assert chosen["num_warps"] * lanes == max(32 * warps, lanes)  # the same threads as elsewhere


@pytest.mark.parametrize("arch", FEATURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products(arch, dtype):
    attention = AttentionQuery(8, 2, 64, 64, dtype, dtype, 0.1)
    experts = ExpertsQuery(8, 2, 64, 64, dtype)
    for kernel, query, stages in (
        ("prefill", attention, 1),
        ("decode", attention, 1),
        ("experts_gate_up", experts, 2),
        ("experts_down", experts, 2),
    ):
        chosen = kernel_options(FEATURES[arch], kernel, query, {**LAUNCH, "PRECISION": "tf32"})
        assert chosen["PRECISION"] == "ieee" and chosen["num_stages"] == stages
        assert ("matrix_instr_nonkdim" in chosen) == ("mfma" in FEATURES[arch])


def test_a_kernel_without_products_keeps_its_options():
    for features in FEATURES.values():
        assert set(kernel_options(features, "gated", NormQuery(8, "bfloat16"), LAUNCH)) == {
            "num_warps"
        }


def test_no_program_reads_what_another_stored():
    query = AttentionQuery(8, 2, 64, 64, "bfloat16", "bfloat16", 0.1)
    for features in FEATURES.values():
        assert kernel_options(features, "decode", query, {**LAUNCH, "LAST": True})["LAST"] is False
