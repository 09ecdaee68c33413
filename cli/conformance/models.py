"""Tiny random models that are made on the spot, and what the engine answers with them on the device under test.

The truth is the engine itself on the CPU with the reference for every op, in float32: it scores what the device
answered. A token may be another than the truth's only where the two are as good as equally likely.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.conformance.local_engine import Answer, LocalEngine, greedy
from headrace.engine.models.registry import selection_queries
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.spec_hf import spec_from_hf
from headrace.platforms.device import DeviceInfo
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import SampleQuery
from headrace.platforms.registry import REFERENCE, Policy, Registry, SelectionError, select

VOCAB = 512
NEW_TOKENS = 24
LENGTHS = (1, 3, 17, 33, 64, 90)
CHUNK = 32  # tokens a step: the longer prompts are read in several
# Natural logarithms. bfloat16 has 8 bits of mantissa: a logit of size 10 is known to 0.04 at best, and every layer adds
# its rounding; a missing term makes differences of whole units.
TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.15}

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma2, soft caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3, windows": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral, experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3, latent attention": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    },
}


def make_model(family: str, folder: Path) -> Path:
    """A folder with config.json and model.safetensors: weights large enough that every part of a layer matters."""
    config = {**_SIZES, **FAMILIES[family]}
    spec = spec_from_hf(config)
    rng = np.random.default_rng(sum(family.encode()))
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        norm = name.endswith("norm.weight")
        values = rng.standard_normal(shape, np.float32) * (0.3 if norm else 1.5 * shape[-1] ** -0.5)
        tensors[name] = values + (1.0 - spec.norm_offset if norm else 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """float32 tensors in the safetensors format: the header's length, the header as JSON, the values."""
    header, offset = {}, 0
    for name, values in tensors.items():
        size = 4 * values.size
        shape, span = list(values.shape), [offset, offset + size]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": span}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.astype("<f4").tobytes())


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def served_by(
    name: str, family: str, dtype: str, device: DeviceInfo, registry: Registry
) -> tuple[list[str], list[str]]:
    """Ops of the model that `name` serves with every query, and reasons why it does not serve others."""
    spec = spec_from_hf({**_SIZES, **FAMILIES[family]})
    queries = [*selection_queries(spec, dtype), ("sample", SampleQuery(VOCAB, 16))]
    can: dict[str, bool] = {}
    why: dict[str, None] = {}
    for op, query in queries:
        if all(row.name != name for row in registry.candidates(op)):
            continue
        try:
            select(op, query, device, registry, Policy(force={op: name}))
            fits = True
        except SelectionError as error:
            fits = False
            why |= {
                f"{op}: {r}": None for c in error.candidates if c.name == name for r in c.reasons
            }
        can[op] = can.get(op, True) and fits
    return [op for op, fits in can.items() if fits], list(why)


class Truth:
    """The reference on the CPU. Engines are kept: each serves all runs of its model."""

    def __init__(self, host: DeviceInfo) -> None:
        self._host = host
        self._engines: dict[Path, LocalEngine] = {}

    def score(self, folder: Path, asked: list[list[int]]) -> list[Answer]:
        """Log-probabilities of every token of these prompts."""
        if folder not in self._engines:
            force = dict.fromkeys(CONTRACTS, REFERENCE)
            engine = LocalEngine(folder, self._host, force=force, prefix_caching=False)
            self._engines[folder] = engine.__enter__()
        return self._engines[folder].run(asked, greedy(1, prompt_logprobs=1))

    def close(self) -> None:
        for engine in self._engines.values():
            engine.__exit__()
        self._engines.clear()


def check_answers(
    asked: list[list[int]], answers: list[Answer], truth: Truth, folder: Path, dtype: str
) -> tuple[float, str]:
    """(largest error as a multiple of the tolerance, what is wrong) of greedy answers with their log-probabilities."""
    tolerance = TOLERANCE[dtype]
    for prompt, answer in zip(asked, answers, strict=True):
        if answer.error or answer.reason != "length":
            return -1.0, f"prompt of {len(prompt)} tokens: {answer.error or answer.reason}"
    whole = [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]
    worst, wrong = 0.0, ""
    for prompt, answer, scored in zip(asked, answers, truth.score(folder, whole), strict=True):
        entries = scored.prompt_logprobs[-len(answer.tokens) :]
        for i, (own, true) in enumerate(zip(answer.logprobs, entries, strict=True)):
            where = f"prompt of {len(prompt)} tokens, new token {i}"
            off = abs(own.logprob - true.logprob)
            # both candidates are off by their own rounding
            gap = (true.top_logprobs[0] - true.logprob) / 2
            if not (off <= tolerance and gap <= tolerance):
                wrong = (
                    wrong
                    or f"{where}: log-probability {own.logprob:.4f}, {true.logprob:.4f} is right"
                    + (
                        f"; {true.top_ids[0]} is the best, not {true.token_id}"
                        if gap > tolerance
                        else ""
                    )
                )
            worst = max(worst, math.inf if off != off else max(off, gap) / tolerance)
    return worst, wrong
