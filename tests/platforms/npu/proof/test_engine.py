"""The whole engine on the NPU platform: numerically over CPU kernels for the package's own ops, and on the meta device,
where schemas, dtypes and shapes are the package's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.cli.conformance.local_engine import LocalEngine
from headrace.engine.models.base import BuildContext, StepContext
from headrace.engine.models.registry import build_model
from headrace.platforms.collectives import SoloCollectives
from headrace.platforms.graph import GraphSupport
from headrace.platforms.npu.attention import FusedInferAttention
from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.ops import Ops
from headrace.platforms.reference.cases import Requests, make_batch, make_caches, scattered_blocks
from headrace.platforms.registry import REFERENCE, Policy, Registry
from tests.engine.driver import greedy
from tests.engine.tiny_models import VOCAB, Tiny, make_tiny, prompt
from tests.platforms.npu import kernels
from tests.platforms.npu.simulated import SimulatedRuntime

# heads of 16, as the attention wants them; the last has a window of 16 tokens in every layer
FAMILIES = ("llama-8-heads", "llama-mha", "qwen3", "qwen3_moe", "mixtral")
BLOCK = 128
LENGTHS = (1, 3, 15, 17, 33, 64, 127, 128, 129, 144)
TOKENS = 24


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory) -> tuple[Tiny, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    made = make_tiny(request.param, folder)
    # norms' weights as checkpoints store them: the op takes them in the dtype of its input
    state = load_file(folder / "model.safetensors")
    rounded = {key: x.bfloat16().float() if "norm" in key else x for key, x in state.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    return made, folder


class Untouched:
    """In place of torch.cuda: shared code that names another device's module shows."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} on an NPU")


@pytest.fixture
def engine(npu, monkeypatch):
    """A function that makes an engine. Without graphs every step is launched op by op."""
    kernels.register()
    monkeypatch.setattr(torch, "cuda", Untouched())
    monkeypatch.setattr(NpuPlatform, "open", lambda self, device: SimulatedRuntime(device))

    def make(folder: Path, graphs: bool = True, **settings: Any) -> LocalEngine:
        support = GraphSupport.DECODE_ONE if graphs else GraphSupport.NEVER
        monkeypatch.setattr(FusedInferAttention, "graph", support)
        given = {"dtype": "bfloat16", "threads": 0, "block_size": BLOCK, **settings}
        return LocalEngine(folder, NpuPlatform.describe("910B"), **given)

    return make


def reference_only() -> dict[str, str]:
    return {row.op: REFERENCE for row in NpuPlatform().implementations()}


def answers(engine: LocalEngine) -> list[list[int]]:
    prompts = [prompt(length) for length in LENGTHS]
    params = [greedy(TOKENS, repetition_penalty=4.0 if i % 2 else 1.0) for i in range(len(LENGTHS))]
    done = engine.run(prompts, params)
    assert not [answer.error for answer in done if answer.error]
    return [answer.tokens for answer in done]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_equal_the_references(tiny, engine, npu, dtype):
    """In batches, chunks and graphs; the reference goes through the same engine, in the same dtype."""
    _, folder = tiny
    with engine(folder, graphs=False, dtype=dtype, force=reference_only()) as plain:
        want = answers(plain)
    for graphs, chunk in ((False, 512), (False, 48), (True, 512), (True, 48)):
        with engine(folder, graphs, dtype=dtype, max_num_batched_tokens=chunk) as native:
            npu.log.clear()
            assert answers(native) == want, f"graphs {graphs}, chunks of {chunk}"
            assert (("replay",) in npu.log) == graphs
            # every replay updates the attention of every layer
            updates = npu.log.count(("update", "side"))
            assert updates == npu.log.count(("replay",)) * native.spec.layers


def test_what_was_chosen_and_why(tiny, engine):
    model, folder = tiny
    with engine(folder) as native:
        rows = native.info.selection
    wanted = {
        "paged_attention": "fia",
        "rms_norm": "torch_npu",
        "fused_add_rms_norm": "torch_npu",
        "rotary_embedding": "rotary_mul",
        "linear": "nz",
    }
    experts = model.source.spec.experts
    wanted |= {"topk_softmax": "torch_npu", "fused_experts": "torch_npu"} if experts else {}
    for op, name in wanted.items():
        chosen = [row for row in rows if row["op"] == op and row["chosen"] == name]
        assert chosen
        for row in chosen:
            (own,) = [c for c in row["candidates"] if c["name"] == name]
            assert own["status"] == "unverified"
            assert any("self-test passed" in reason for reason in own["reasons"])
    # what is left to the reference is so for a reason that was known before: the router's and the vocabulary's rows
    for row in rows:
        if row["op"] in wanted and row["chosen"] == REFERENCE:
            (own,) = [c for c in row["candidates"] if c["name"] == wanted[row["op"]]]
            assert own["status"] == "no" and "no multiple of 16" in own["reasons"][0]


def test_a_kernel_that_is_wrong_is_not_used(tiny, engine, monkeypatch):
    """What a device with another idea of the window or of the norm would come to."""
    _, folder = tiny
    right = kernels.fused_infer_attention_score

    def wrong(*tensors: torch.Tensor, **rules: Any) -> Any:
        out, lse = right(*tensors, **rules)
        return out * 1.1, lse

    library = torch.library.Library("npu", "IMPL")
    try:
        library.impl("npu_fused_infer_attention_score", wrong, "CPU", allow_override=True)
        with engine(folder) as native:
            rows = {row["op"]: row for row in native.info.selection}
            assert rows["paged_attention"]["chosen"] == REFERENCE
            (own,) = [c for c in rows["paged_attention"]["candidates"] if c["name"] == "fia"]
            assert "self-test failed" in own["reasons"][0]
    finally:
        library._destroy()


# -- the meta device --------------------------------------------------------------------------------------------------

META = torch.device("meta")


@pytest.fixture(scope="module")
def meta_ops():
    """Ops of the platform on the meta device. The package gives npu_format_cast no shapes: it keeps its input's."""
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_format_cast", lambda x, acl_format, **_: torch.empty_like(x), "Meta")
    info = NpuPlatform.describe("910B")

    class Meta:
        def __init__(self) -> None:
            from headrace.platforms.npu.recorder import Captures

            self.info, self.device, self.captures = info, META, Captures()
            self.tuned: dict[str, Any] = {}

    runtime: Any = Meta()
    registry = Registry.with_reference(NpuPlatform().implementations())
    # numbers that do not exist cannot be compared
    yield Ops(registry, info, runtime, Policy(self_test=False))
    library._destroy()


@pytest.mark.parametrize(
    "lengths",
    [((33, 33),), ((5, 1), (130, 1)), ((200, 1), (300, 1), (70, 20), (18, 18))],
    ids=["a prompt", "decodes", "decodes, a chunk and a prompt"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shapes_on_the_meta_device(tiny, meta_ops, lengths, dtype):
    model, _ = tiny
    context = BuildContext(meta_ops, getattr(torch, dtype), SoloCollectives(), dtype, META)
    native = build_model(model.source.spec, context, 512)
    native.load_weights(model.source, lambda done, total, text: None)
    requests = Requests(lengths)
    table = scattered_blocks(requests, BLOCK, 0)
    batch = make_batch(requests, table, BLOCK, META)
    groups = len({spec.window for spec in native.kv_specs})
    batch.block_tables *= groups
    batch.slot_mappings *= groups
    caches = [
        make_caches(impl, BLOCK, 1 + int(table.max()), META) for impl in native.attention_impls
    ]
    native.bind_kv(_plan(native), caches)
    plans = [impl.plan(batch, group) for impl, group in native.plan_keys]
    tokens = sum(new for _, new in lengths)
    ids = torch.zeros(tokens, dtype=torch.int32, device=META)
    positions = torch.zeros(tokens, dtype=torch.int64, device=META)
    hidden = native.forward(ids, positions, StepContext(plans))
    assert hidden.shape == (tokens, native.spec.hidden) and hidden.device == META
    logits = native.logits(hidden)
    assert logits.shape == (tokens, VOCAB)
    chosen = {decision.op: decision.chosen for decision in meta_ops.report.decisions}
    assert chosen["paged_attention"] == "fia" and chosen["linear"] in ("nz", REFERENCE)


def _plan(model: Any) -> Any:
    from tests.engine.model_harness import simple_plan

    return simple_plan(model, 64)
