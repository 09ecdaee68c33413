"""Experts over tiles that the device copies, chosen or not, against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import ExpertsQuery
from headrace.platforms.reference import cases

pytestmark = pytest.mark.device

# sizes that no tile divides
QUERY = ExpertsQuery(16, 2, 520, 264, "bfloat16")
BLOCKS = {"TILED": True, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
WAYS = {
    "weights first": {"SWAP": True, "PROGRAMS": 2},
    "weights first, asked for ahead": {"SWAP": True, "PROGRAMS": 2, "AHEAD": 256},
    "a program for each tile": {"SWAP": True, "PROGRAMS": 0},
    "tokens first": {"SWAP": False, "PROGRAMS": 1},
    "tokens first, a program for each tile": {"SWAP": False, "PROGRAMS": 0, "num_warps": 8},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", WAYS)
def test_copied_tiles(make, runtime, monkeypatch, way):
    """Tiles of all four heights, one after the other; an expert that nobody chose."""
    asked = []

    def changed(kernel, query, options):
        if "TILED" not in options:
            return {}
        asked.append((kernel, options["BLOCK_M"]))
        return {**BLOCKS, **WAYS[way]}

    monkeypatch.setattr(runtime, "kernel_options", changed)
    if "tma" not in runtime.info.features:
        pytest.skip(f"{runtime.info.arch} copies no tiles")
    draw = cases._Draw(runtime.device, 3)
    w13 = draw.normal(16, 528, 520, dtype="bfloat16", scale=520**-0.5)
    w2 = draw.normal(16, 520, 264, dtype="bfloat16", scale=264**-0.5)
    ours, reference = (make("fused_experts", name, QUERY) for name in ("triton", "reference"))
    assert len(asked) == 8
    packed = ours.pack(w13, w2), reference.pack(w13, w2)
    relative, absolute = CONTRACTS["fused_experts"].tolerance["bfloat16"]
    for tokens in (20, 100, 200, 600, 1500):
        x = draw.normal(tokens, 520, dtype="bfloat16")
        logits = draw.normal(tokens, 16, scale=2.0)
        logits[:, 3] = -100.0
        weights, ids = logits.softmax(1).topk(2)
        results = [
            op(x, weights, ids.int(), held)
            for op, held in zip((ours, reference), packed, strict=True)
        ]
        torch.testing.assert_close(*results, rtol=relative, atol=absolute)
