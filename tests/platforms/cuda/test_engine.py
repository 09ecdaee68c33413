"""The whole engine on the device: tiny random models give what transformers gives, with and without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.core.sampling import SamplingParams
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.graph import GraphSupport
from tests.engine.driver import LocalEngine, config_for, greedy

REASON = CudaPlatform.plausible()
pytestmark = [pytest.mark.device, pytest.mark.skipif(bool(REASON), reason=str(REASON))]

FAMILIES = (
    "llama",
    "llama-8-heads",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "deepseek_v3",
)


class CudaEngine(LocalEngine):
    def __init__(self, model: Path | str, **settings: Any) -> None:
        from headrace.engine.weights.sources import read_spec, resolve_model
        from headrace.engine.workers.start import make_executor

        self.config = config_for(model, threads=0, **settings)
        files = resolve_model(self.config.model)
        self.spec = read_spec(files)
        self.executor = make_executor(self.config, files, self.spec, CudaPlatform.probe()[0])
        self.phases = []


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request, tmp_path_factory):
    reason = CudaPlatform.plausible()
    if reason:
        pytest.skip(reason)
    pytest.importorskip("transformers")
    from tests.engine import test_equality_tiny as equality
    from tests.engine.tiny_models import make_tiny, prompt

    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny(request.param, folder).truth
    lengths = (1, 3, 15, 17, 33, 64, 89, 144)
    penalties = [equality.PENALTY if i % 2 else 1.0 for i in range(len(lengths))]
    params = [greedy(equality.NEW_TOKENS, repetition_penalty=p) for p in penalties]
    prompts = [prompt(length) for length in lengths]
    return equality.TinyTruth(model, prompts, params, folder=folder)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("chunk", "overlap"), [(16, True), (512, True), (512, False)])
def test_greedy_tokens(truth, monkeypatch, graphs, chunk, overlap):
    from headrace.platforms.triton.attention import TritonAttention

    if not graphs:
        monkeypatch.setattr(TritonAttention, "graph", GraphSupport.NEVER)
    with CudaEngine(truth.folder, max_num_batched_tokens=chunk, overlap=overlap) as engine:
        truth.check(engine.run(truth.prompts, truth.params))
        truth.check(engine.run(truth.prompts, truth.params))


def test_what_is_sampled_in_a_graph_is_what_is_sampled_without(tmp_path, monkeypatch):
    """Greedy and drawn within the graph, from changed logits behind it, and log-probabilities of the graph's logits."""
    from headrace.platforms.triton.attention import TritonAttention
    from tests.engine.tiny_models import make_tiny, prompt

    make_tiny("llama", tmp_path)
    params = [
        greedy(40),
        greedy(40, logprobs=2),
        greedy(40, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, seed=3, max_tokens=40),
        SamplingParams(temperature=0.8, top_p=0.7, seed=4, max_tokens=40, logprobs=1),
        SamplingParams(temperature=0.8, top_k=7, seed=5, max_tokens=40, logit_bias={11: 2.0}),
        SamplingParams(temperature=1.2, min_p=0.05, seed=6, max_tokens=40),
    ]
    prompts = [prompt(length) for length in (5, 17, 30, 3, 64, 9, 21)]
    found = []
    for support in (TritonAttention.graph, GraphSupport.NEVER):
        monkeypatch.setattr(TritonAttention, "graph", support)
        with CudaEngine(tmp_path, dtype="float32") as engine:
            alone = engine.run(prompts[:1], params[3])  # 40 steps of one request
            found.append([*alone, *engine.run(prompts, params)])
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens and len(one.tokens) == 40 and not one.error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_waits_for_nothing_within_a_step(tmp_path, temperature):
    """Prompts and decodes, captured and not; new requests, blocks and results come meanwhile."""
    from tests.engine.tiny_models import make_tiny, prompt

    make_tiny("llama", tmp_path)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24)
    prompts = [prompt(length) for length in (5, 17, 30, 3, 64, 9, 21)]
    with CudaEngine(tmp_path, dtype="bfloat16") as engine:
        for _ in range(3):
            want = [answer.tokens for answer in engine.run(prompts, params)]
            engine.scheduler.kv.forget_all()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = engine.run(prompts, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [(answer.tokens, answer.error) for answer in found] == [(ids, "") for ids in want]


def test_a_worker_process(truth):
    with CudaEngine(truth.folder, worker="process") as engine:
        truth.check(engine.run(truth.prompts, truth.params))


def test_every_op_is_served_by_the_kernels(truth):
    with CudaEngine(truth.folder, dtype="bfloat16") as engine:
        chosen = {row["op"]: row["chosen"] for row in engine.info.selection}
        for op in ("paged_attention", "rms_norm", "fused_add_rms_norm", "rotary_embedding"):
            assert chosen[op] == "triton"
        answers = engine.run(truth.prompts, greedy(8))
        assert all(len(answer.tokens) == 8 and not answer.error for answer in answers)
