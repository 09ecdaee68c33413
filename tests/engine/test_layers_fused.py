"""Layers over implementations that fuse: norms and what follows them; rotary and write of q and k; gated products."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.platforms.reference import ops
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.experts import GATED
from headrace.platforms.reference.linear import ReferenceLinear
from tests.engine.model_harness import Engine, load_model, make_ops
from tests.engine.tiny_models import make_tiny, prompt


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The reference made to fuse, by the contracts' words; how often each method was called."""
    counted: Counter[str] = Counter()

    def turn_and_write(self: Any, q: Any, k: Any, v: Any, turn: Any, caches: Any, plan: Any) -> Any:
        counted["turn_and_write"] += 1
        if turn.norms:
            counted["norms"] += 1
            q, k = (ops.rms_norm(x, w, turn.eps) for x, w in zip((q, k), turn.norms, strict=True))
        ops.rotary_embedding(turn.positions, q, k, turn.cos_sin, True)
        self.write(k, v, *caches, plan)
        return q

    def gated(self: Any, x: torch.Tensor, packed: Any, activation: str) -> torch.Tensor:
        counted["gated"] += 1
        return GATED[activation](self(x, packed))

    def normed(
        self: Any, x: Any, residual: Any, norm: Any, packed: Any, activation: str, keep: bool
    ) -> Any:
        counted["normed"] += 1
        counted["kept"] += keep
        x, total = ops.fused_add_rms_norm(x, residual, norm.weight, norm.eps)
        y = GATED[activation](self(x, packed)) if activation else self(x, packed)
        return y, total, x if keep else None

    monkeypatch.setattr(ReferenceLinear, "normed_rows", 1)
    monkeypatch.setattr(ReferenceLinear, "normed", normed)
    monkeypatch.setattr(ReferenceAttention, "turns", lambda self, rotary: rotary.is_neox)
    monkeypatch.setattr(ReferenceAttention, "turn_and_write", turn_and_write)
    monkeypatch.setattr(ReferenceLinear, "gated_rows", 1)
    monkeypatch.setattr(ReferenceLinear, "gated", gated)
    return counted


@pytest.mark.parametrize(
    ("name", "norms", "gated"),
    [
        ("llama", False, True),
        ("qwen3", True, True),
        ("gemma3", True, True),
        ("mixtral", False, False),
    ],
)
def test_models_are_the_same(
    name: str, norms: bool, gated: bool, tmp_path: Path, calls: Counter[str]
) -> None:
    tiny = make_tiny(name, tmp_path)
    engine = Engine(load_model(tiny.source, max_model_len=64, ops=make_ops()))
    tokens = prompt(20)
    seq = engine.sequence()
    got = torch.cat([engine.run(seq, tokens[:17]), engine.run(seq, tokens[17:], chunk=1)])
    torch.testing.assert_close(got, tiny.logits(tokens), rtol=1e-4, atol=1e-4)
    layers = len(engine.model.kv_specs)
    assert calls["turn_and_write"] == 4 * layers  # one prompt and three decodes
    assert calls["norms"] == (4 * layers if norms else 0)
    # steps of one token only; before the first layer there is nothing to add
    assert calls["normed"] == 3 * (2 * layers - 1)
    assert calls["kept"] == (0 if gated else 3 * layers)  # the experts want what the router saw
