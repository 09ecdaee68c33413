"""Mixture of experts in every form of storage: fused safetensors, GGUF stacks plain and quantized, old GGUF, dummy."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.cli.configure import configure, find_device
from headrace.cli.prepare import decide, prepare
from headrace.engine.config.flag import Given
from headrace.engine.config.names import all_spellings
from headrace.engine.layers.moe import Experts
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.mixtral import Mixtral
from headrace.engine.models.registry import build_model
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.experts import by_expert
from headrace.engine.weights.local import files_at, gguf_files
from headrace.engine.weights.source import ModelError, WeightSource
from headrace.engine.weights.sources import open_source
from tests.engine.model_harness import (
    Engine,
    StateHandle,
    StateSource,
    load_model,
    make_context,
    make_ops,
)
from tests.engine.tiny_models import Tiny, make_tiny, prompt

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MODELS = ("mixtral", "qwen2_moe", "qwen3_moe")
ARCH = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# Hugging Face's name within a layer -> GGUF's
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{c}_proj": f"attn_{c}" for c in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def same_logits(tiny: Tiny, source: WeightSource) -> None:
    tokens = prompt(30)
    engine = Engine(load_model(source, ops=make_ops("cpu")))
    got = engine.run(engine.sequence(), tokens, chunk=16)
    torch.testing.assert_close(got, tiny.logits(tokens), **CLOSE)


@pytest.mark.parametrize("platform", ["reference", "cpu"])
def test_bfloat16_is_no_further_off_than_transformers(tiny: Tiny, platform: str) -> None:
    """Rounding may send a token to another expert, so the measure is transformers' own bfloat16, on average."""
    tokens = prompt(64)
    want = tiny.logits(tokens).log_softmax(-1)
    rounded = copy.deepcopy(tiny.truth).bfloat16()
    with torch.inference_mode():
        theirs = rounded(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    engine = Engine(load_model(tiny.source, dtype=torch.bfloat16, ops=make_ops(platform)))
    got = engine.run(engine.sequence(), tokens).log_softmax(-1)
    assert (got - want).abs().mean() < 1.2 * (theirs - want).abs().mean()


def test_fused_safetensors(tiny: Tiny, tmp_path: Path) -> None:
    """What transformers holds in memory, and saves when it is not asked for the hub's form."""
    tiny.truth.save_pretrained(tmp_path, save_original_format=False)
    source = open_source(files_at("tiny", tmp_path))
    assert source.spec == tiny.source.spec
    names = set(source.names())
    sparse = next(i for i in range(3) if source.spec.sparse(i))
    assert f"model.layers.{sparse}.mlp.experts.7.up_proj.weight" in names
    assert not any("gate_up" in name for name in names)
    same_logits(tiny, source)
    source.close()


def test_fused_torch_files(qwen3_moe: Tiny, tmp_path: Path) -> None:
    qwen3_moe.truth.config.save_pretrained(tmp_path)
    torch.save(qwen3_moe.truth.state_dict(), tmp_path / "pytorch_model.bin")
    source = open_source(files_at("tiny", tmp_path))
    same_logits(qwen3_moe, source)
    source.close()


def by_llama_cpp(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter orders them for the llama architecture."""
    halves = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def gguf_tensors(
    spec: ModelSpec, state: Mapping[str, torch.Tensor], stacked: bool
) -> dict[str, np.ndarray]:
    """The tensors as llama.cpp names and shapes them."""
    rename = Mixtral.rename if spec.architecture == "mixtral" else lambda _, name: name
    own = {rename(None, name): value.float().numpy() for name, value in state.items()}  # type: ignore[arg-type]
    found: dict[str, np.ndarray] = {}
    for name, value in own.items():
        part, _, suffix = name.rpartition(".")
        if part in TOP:
            found[f"{TOP[part]}.{suffix}"] = value
            continue
        _, _, layer, inner = part.split(".", 3)
        if ".experts." in inner:
            if not stacked:
                _, _, expert, kind = inner.split(".")
                found[f"blk.{layer}.ffn_{kind.removesuffix('_proj')}.{expert}.weight"] = value
            continue
        if spec.architecture == "mixtral" and inner.endswith(("q_proj", "k_proj")):
            value = by_llama_cpp(value, spec.heads if "q_proj" in inner else spec.kv_heads)
        if inner == "mlp.shared_expert_gate":
            value = value[0]  # as a vector
        found[f"blk.{layer}.{IN_LAYER[inner]}.{suffix}"] = value
    for layer in range(spec.layers if stacked else 0):
        for kind in ("gate", "up", "down") if spec.sparse(layer) else ():
            name = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
            stack = [own[name.format(layer, e, kind)] for e in range(spec.experts)]
            found[f"blk.{layer}.ffn_{kind}_exps.weight"] = np.stack(stack)
    return found


def write_gguf(
    path: Path, spec: ModelSpec, state: Mapping[str, torch.Tensor], stacked: bool, quantized: bool
) -> dict[str, np.ndarray]:
    """Writes the model; returns the tensors as they can be read back."""
    arch = ARCH[spec.architecture]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.ropes[0].theta)
    writer.add_expert_count(spec.experts)
    writer.add_expert_used_count(spec.experts_per_token)
    if spec.windows:
        writer.add_sliding_window(spec.windows[0])
    if spec.architecture != "mixtral":
        writer.add_expert_feed_forward_length(spec.moe_intermediate)
    values = gguf_tensors(spec, state, stacked)
    for name, value in values.items():
        if quantized and (name.endswith("_exps.weight") or ".ffn_gate." in name):
            raw = gguf.quants.quantize(value, Q8_0)
            values[name] = gguf.quants.dequantize(raw, Q8_0)
            writer.add_tensor(name, raw, raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_gguf_stacks(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny.source.spec, tiny.source.state, stacked=True, quantized=False)
    source = open_source(gguf_files("m", path))
    spec, want = source.spec, tiny.source.spec
    for field in ("architecture", "experts", "experts_per_token", "moe_intermediate",
                  "shared_intermediate", "norm_topk_prob", "dense_layers", "windows"):  # fmt: skip
        assert getattr(spec, field) == getattr(want, field), field
    same_logits(tiny, source)
    source.close()


def test_gguf_with_a_tensor_for_each_expert(tmp_path: Path) -> None:
    """The first Mixtral files."""
    tiny, path = make_tiny("mixtral", tmp_path), tmp_path / "m.gguf"
    write_gguf(path, tiny.source.spec, tiny.source.state, stacked=False, quantized=False)
    source = open_source(gguf_files("m", path))
    same_logits(tiny, source)
    source.close()


@pytest.fixture(scope="module")
def quantized(qwen3_moe: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tiny]:
    """A file with experts in Q8_0, and the model with the weights that it holds."""
    path = tmp_path_factory.mktemp("quantized") / "m.gguf"
    tiny = qwen3_moe
    values = write_gguf(path, tiny.source.spec, tiny.source.state, stacked=True, quantized=True)
    truth = type(tiny.truth)(tiny.truth.config).eval()
    truth.load_state_dict(tiny.truth.state_dict())
    for layer, block in enumerate(truth.model.layers):
        if tiny.source.spec.sparse(layer):
            gate, up, down = (
                torch.from_numpy(values[f"blk.{layer}.ffn_{kind}_exps.weight"])
                for kind in ("gate", "up", "down")
            )
            block.mlp.experts.gate_up_proj.data.copy_(torch.cat([gate, up], 1))
            block.mlp.experts.down_proj.data.copy_(down)
        else:
            gate = torch.from_numpy(values[f"blk.{layer}.ffn_gate.weight"])
            block.mlp.gate_proj.weight.data.copy_(gate)
    return path, Tiny("quantized", truth, tiny.source)


def test_quantized_gguf_dequantized(quantized: tuple[Path, Tiny]) -> None:
    source = open_source(gguf_files("m", quantized[0]))
    same_logits(quantized[1], source)
    source.close()


def model_on_blocks(source: WeightSource) -> tuple[Decoder, Any]:
    ctx = make_context(ops=make_ops("cpu"))
    ctx.schemes = {
        n: source.get(n).scheme for n in source.names() if source.get(n).scheme == "Q8_0"
    }
    return build_model(source.spec, ctx, 64), ctx


def test_quantized_gguf_on_its_blocks(quantized: tuple[Path, Tiny]) -> None:
    """Experts keep their blocks: activations are rounded to 8 bits, so logits are near and not equal."""
    path, tiny = quantized
    source = open_source(gguf_files("m", path))
    model, ctx = model_on_blocks(source)
    chosen = {d.chosen: d.query for d in ctx.ops.report.decisions if d.op == "fused_experts"}
    if "native" not in chosen:
        pytest.skip("the native kernels are not built")
    assert (chosen["native"].scheme, chosen["native"].down_scheme) == ("Q8_0", "Q8_0")
    model.load_weights(source, lambda done, total, text: None)
    source.close()  # the packed experts no longer look at the file
    tokens = prompt(30)
    engine = Engine(model)
    want = tiny.logits(tokens)
    error = (engine.run(engine.sequence(), tokens, chunk=16) - want).abs()
    # the median: rounding may send single tokens to another expert, which is no small change
    assert error.median() < 0.02 * want.std() and error.max() > 0


def test_ranks_share_stored_blocks(qwen3_moe: Tiny) -> None:
    """Columns of down are cut between blocks: the ranks' terms sum to the whole."""
    spec = replace(qwen3_moe.source.spec, moe_intermediate=64)
    torch.manual_seed(0)
    state = {
        f"experts.{e}.{kind}_proj.weight": torch.randn(64, 64) / 8
        for e in range(spec.experts)
        for kind in ("gate", "up", "down")
    }
    tensors = {name: BlockHandle(name, value) for name, value in state.items()}
    x, weights = torch.randn(5, 64), torch.rand(5, 3)
    ids = torch.rand(5, spec.experts).argsort(1)[:, :3].int()

    def term(world: int, rank: int) -> torch.Tensor:
        ctx = make_context(ops=make_ops("cpu"))
        ctx.collectives.world, ctx.collectives.rank = world, rank
        ctx.schemes = dict.fromkeys(state, "Q8_0")
        layer = Experts(ctx, spec, "experts")
        if ctx.ops.report.decisions[-1].chosen != "native":
            pytest.skip("the native kernels are not built")
        layer.load(tensors)
        return layer(x, weights, ids)

    torch.testing.assert_close(term(2, 0) + term(2, 1), term(1, 0), rtol=1e-4, atol=1e-4)


class BlockHandle(StateHandle):
    """A tensor in memory that gives its blocks of Q8_0."""

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        return gguf.quants.quantize(self.value.numpy(), Q8_0)[rows or slice(None)]


def test_explain_knows_the_blocks(quantized: tuple[Path, Tiny]) -> None:
    """What `headrace explain` says is what loading the same file binds."""
    path, _ = quantized
    flags = {"--device": "cpu", "--weights": "blocks", "--dtype": "float32"}
    given = [Given(all_spellings()[name].flag, text, "test") for name, text in flags.items()]
    config = configure(str(path), given, "")
    plan = prepare(config, find_device(config, described=True))
    told = [(d.op, d.query, d.chosen) for d in decide(plan) if d.op in ("fused_experts", "linear")]
    source = open_source(gguf_files("m", path))
    _, ctx = model_on_blocks(source)
    source.close()
    bound = [(d.op, d.query, d.chosen) for d in ctx.ops.report.decisions]
    assert told == [row for row in bound if row[0] in ("fused_experts", "linear")]
    assert any(op == "fused_experts" for op, _, _ in told)


def test_dummy_weights(tiny: Tiny, tmp_path: Path) -> None:
    tiny.truth.config.save_pretrained(tmp_path)
    source = open_source(files_at("tiny", tmp_path, "dummy"))
    engine = Engine(load_model(source, ops=make_ops("cpu")))
    assert engine.run(engine.sequence(), prompt(20)).isfinite().all()


def test_a_stack_of_the_wrong_size_is_refused(qwen3_moe: Tiny) -> None:
    state = dict(qwen3_moe.truth.state_dict())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for wrong, text in (
        (state[name][:1], r"missing: model\.layers\.1\.mlp\.experts\.1\.gate_proj.* and 2 more"),
        (state[name][:, :-2], r"experts\.0\.gate_proj\.weight is \[31, 64\] instead of \[32, 64\]"),
    ):
        source = by_expert(StateSource(qwen3_moe.source.spec, {**state, name: wrong}))
        with pytest.raises(ModelError, match=text) as caught:
            load_model(source)
        assert len(str(caught.value)) < 1500


def test_experts_that_cannot_be_divided_are_refused(qwen3_moe: Tiny) -> None:
    ctx = make_context()
    ctx.collectives.world = 3  # type: ignore[misc]
    with pytest.raises(ModelError, match="use a tensor parallel size that divides"):
        build_model(qwen3_moe.source.spec, ctx, 64)


def test_config_of_old_and_new_transformers(qwen3_moe: Tiny, tmp_path: Path) -> None:
    """num_experts has become num_local_experts in what transformers 5 saves for Qwen3-MoE."""
    from headrace.engine.weights.spec_hf import spec_from_hf

    qwen3_moe.truth.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    count = config.pop("num_experts", None) or config.pop("num_local_experts")
    specs = [spec_from_hf({**config, key: count}) for key in ("num_experts", "num_local_experts")]
    assert specs[0] == specs[1] == qwen3_moe.source.spec
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        spec_from_hf({**config, "num_experts": 2})
