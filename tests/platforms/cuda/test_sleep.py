"""Sleep on the device: memory really comes back, addresses in captured graphs stay, answers are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.graph import GraphSupport
from headrace.platforms.torch_device.allocator import TorchAllocator
from headrace.platforms.torch_device.vmm import CUDA, Driver
from tests.engine.driver import greedy
from tests.platforms.cuda.test_engine import CudaEngine

pytestmark = pytest.mark.device

MIB = 1 << 20

# About 0.9 GB in bfloat16: what sleep gives back cannot be mistaken for anything else.
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# About 0.4 GB: experts are packed in a way of their own.
EXPERTS = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PROMPTS = [[7 * i % 31999 + 1 for i in range(length)] for length in (5, 64, 190)]


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def allocator(runtime):
    made = TorchAllocator(runtime.device, lambda: Driver(CUDA, runtime.info.index))
    made.allow_sleep()
    assert made.stays_awake("kv") == ""
    yield made
    torch.cuda.synchronize()
    for tag in ("kv", "weights"):
        made.free(tag)


def test_memory_comes_back_and_a_graph_finds_it_again(runtime, allocator):
    before = free()
    cache = allocator.reserve(700 * MIB, "kv")
    assert before - free() >= 700 * MIB and not cache.any()
    weight = torch.randn(300 * MIB // 4, device=runtime.device)
    part = weight[5:77]
    kept = weight.cpu()
    allocator.adopt([weight, part], "weights")
    assert part.data_ptr() == weight.data_ptr() + 20 and torch.equal(weight.cpu(), kept)
    target = cache.view(torch.float32)[: weight.numel()]
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(72, device=runtime.device)

    def body() -> None:
        target.copy_(weight).mul_(2)
        out.copy_(part).add_(target[5:77])

    body()  # kernels are loaded before the capture
    with torch.cuda.graph(graph):
        body()
    awake = free()
    given = allocator.sleep("kv", keep=False) + allocator.sleep("weights", keep=True)
    assert given >= 1000 * MIB and free() - awake >= given - 8 * MIB
    allocator.wake("weights")
    allocator.wake("kv")
    assert abs(free() - awake) <= 8 * MIB
    assert not cache.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), 3 * kept[5:77]) and torch.equal(target.cpu(), 2 * kept)


def test_too_little_memory_leaves_the_tag_asleep(runtime, allocator):
    cache = allocator.reserve(512 * MIB, "kv")
    cache.fill_(3)
    allocator.sleep("kv", keep=False)
    hog = torch.empty(free() - 256 * MIB, dtype=torch.uint8, device=runtime.device)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.wake("kv")
    del hog
    torch.cuda.empty_cache()
    allocator.wake("kv")
    assert not cache.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    reason = CudaPlatform.plausible()
    if reason:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("dummy")
    (made / "config.json").write_text(json.dumps(SIZES))
    (made / "experts").mkdir()
    (made / "experts" / "config.json").write_text(json.dumps(EXPERTS))
    return made


def answers(engine: CudaEngine) -> list[list[int]]:
    found = [answer.tokens for answer in engine.run(PROMPTS, greedy(24))]
    engine.scheduler.kv.forget_all()
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_experts_sleep(folder, level):
    settings = {"load_format": "dummy", "dtype": "bfloat16", "sleep_mode": True}
    with CudaEngine(folder / "experts", **settings) as engine:
        answers(engine)
        before = answers(engine)
        given = sum(engine.executor.call("sleep", level)["freed_bytes"].values())
        assert given >= engine.info.weight_bytes * 0.98 + engine.plan.total_bytes
        engine.executor.call("wake", ["weights", "kv_cache"])
        assert answers(engine) == before


def test_ranks_sleep_together(folder):
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    settings = {"load_format": "dummy", "dtype": "bfloat16", "sleep_mode": True}
    with CudaEngine(folder, tensor_parallel_size=2, **settings) as engine:
        answers(engine)
        before = answers(engine)
        awake = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
        for level in (1, 2):
            given = sum(engine.executor.call("sleep", level)["freed_bytes"].values())
            for index in range(2):
                assert torch.cuda.mem_get_info(index)[0] - awake[index] >= given * 0.97
            engine.executor.call("wake", ["weights", "kv_cache"])
            assert answers(engine) == before


def test_a_step_without_memory_is_made_smaller(folder):
    """Steps of four prompts: so large that what the allocator rounds up to does not count."""
    settings = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048, "eager": True}
    prompts = [[(5 * i + at) % 31999 + 1 for i in range(1900)] for at in range(8)]
    with CudaEngine(folder, max_num_batched_tokens=8192, num_blocks=600, **settings) as engine:
        answers(engine)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.run(prompts[:4], greedy(4))
        step = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        hog = torch.empty(free() - step * 3 // 4, dtype=torch.uint8, device="cuda")
        found = engine.run(prompts[4:], greedy(4))
        del hog
        assert [(len(answer.tokens), answer.error) for answer in found] == [(4, "")] * 4
        assert 1024 <= engine.scheduler._budget < 8192  # one or two halvings, not down to nothing


@pytest.mark.parametrize("worker", ["inproc", "process"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_the_same_after_sleep(folder, monkeypatch, level, graphs, worker):
    if not graphs:
        from headrace.platforms.triton.attention import TritonAttention

        if worker == "process":
            pytest.skip("a process of its own is not patched")
        monkeypatch.setattr(TritonAttention, "graph", GraphSupport.NEVER)
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "sleep_mode": True}
    with CudaEngine(folder, worker=worker, **settings) as engine:
        answers(engine)  # graphs of these sizes are captured by now
        before, awake = answers(engine), free()
        for _ in range(2):
            answer = engine.executor.call("sleep", level)
            given = sum(answer["freed_bytes"].values())
            assert not answer["notes"]
            assert given >= engine.info.weight_bytes * 0.98 + engine.plan.total_bytes
            assert free() - awake >= given * 0.97
            engine.executor.call("wake", ["weights"])
            engine.executor.call("wake", ["kv_cache"])
            assert answers(engine) == before
        assert abs(free() - awake) <= 256 * MIB
