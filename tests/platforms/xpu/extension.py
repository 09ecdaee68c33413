"""Intel's extension for PyTorch as far as the XPU platform calls it, in plain PyTorch: what the kernels for GPUs of
release 2.8.10 check, the order of axes that they read, and what they compute. prove.py compares the signatures with
the real package's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch

NAME = "intel_extension_for_pytorch"


def need(ok: bool, what: str) -> None:
    if not ok:
        raise RuntimeError(what)


class PagedAttention:
    """Caches [blocks, block size, heads, head size]."""

    @classmethod
    def reshape_and_cache_flash(
        cls, key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype="auto", k_scale=1.0, v_scale=1.0
    ):  # fmt: skip
        need(key_cache.stride(0) == value_cache.stride(0), "blocks of unlike strides")
        for new in (key, value):
            need(new.stride()[1:] == (new.shape[2], 1), "only tokens may lie apart")
        size = key_cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                key_cache[slot // size, slot % size] = key[token]
                value_cache[slot // size, slot % size] = value[token]

    @classmethod
    def flash_attn_varlen_func(
        cls, output, query, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
        scale, is_cusal, block_tables, alibi_slopes, window_size_left=-1, window_size_right=-1,
        kv_cache_dtype="auto", k_scale=1.0, v_scale=1.0, softcap=-1.0,
    ):  # fmt: skip
        need(query.dtype == key_cache.dtype == value_cache.dtype, "one dtype")
        for tensor in (query, key_cache, value_cache, output, block_tables):
            need(tensor.is_contiguous(), "contiguous")
        for tensor in (cu_seqlens_q, cu_seqlens_kv, block_tables):
            need(tensor.dtype == torch.int32, "int32")
        size, group = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
        need(size in (64, 128), f"unsupported block size {size}")
        need(query.shape[2] % 64 == 0, "heads would be padded by a copy of the cache")
        need(len(block_tables) == len(cu_seqlens_q) - 1, "a table for each request")
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        for i, table in enumerate(block_tables):
            first, last, length = starts[i], starts[i + 1], ends[i + 1] - ends[i]
            need(last - first <= max_seqlen_q and length <= max_seqlen_kv, "longer than said")
            q = query[first:last].float()
            at = torch.arange(length)
            k, v = (
                cache[table.long()[at // size], at % size].float().repeat_interleave(group, 1)
                for cache in (key_cache, value_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(length - len(q), length)[:, None]
            seen = at <= position if is_cusal else torch.ones(len(q), length, dtype=torch.bool)
            if window_size_left >= 0:
                seen &= at >= position - window_size_left
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            output[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(output.dtype)
        return output


class GatedMLPMOE:
    """Experts are chosen by the logits; a routing function replaces the weights alone."""

    def __init__(self, W13, W2, W3=None, use_prepack=True):
        self._w13, self._w2 = W13, W2

    def __call__(
        self, hidden_states, use_grouped_topk, top_k, router_logits, renormalize, topk_group=None,
        num_expert_group=None, custom_routing_function=None, scoring_func="softmax",
        e_score_correction_bias=None,
    ):  # fmt: skip
        need(top_k in (1, 2, 4, 6, 8), f"unsupported top k {top_k}")
        need(hidden_states.is_contiguous() and not use_grouped_topk, "contiguous, not grouped")
        weights, chosen = router_logits.float().softmax(-1).topk(top_k, -1)
        weights, _ = custom_routing_function(
            hidden_states=hidden_states, gating_output=router_logits, topk=top_k, renormalize=False
        )
        need(not renormalize, "the weights are as they are given")
        result = torch.zeros(hidden_states.shape)
        for token, row in enumerate(hidden_states):
            for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                gate, up = (self._w13[expert] @ row).chunk(2)
                down = self._w2[expert] @ (torch.nn.functional.silu(gate) * up)
                result[token] += weight * down.float()
        return result.to(hidden_states.dtype)


def rms_norm(hidden_states, weight, eps):
    x = hidden_states.float()
    return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(
        hidden_states.dtype
    )


def add_rms_norm(residual, x, weight, bias, eps, add_back=False):
    need(weight.dtype == x.dtype == residual.dtype, "the fused kernel reads weights as x's dtype")
    need(add_back and residual.is_contiguous(), "written back")
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rotary_embedding(query, key, sin, cos, rotary_dim, rotary_half, position_ids=None):
    """In place; the angles of a token for all dimensions of a head."""
    for x in (query, key):
        need(rotary_half and rotary_dim == x.shape[-1] == sin.shape[-1], "whole heads, halves")
        c, s = cos.expand(x.shape).float(), sin.expand(x.shape).float()
        a, b = x.float().chunk(2, -1)
        x.copy_(torch.cat((a, b), -1) * c + torch.cat((-b, a), -1) * s)
    return query, key


class QuantMethod(IntEnum):
    GPTQ_GEMM = 0
    AWQ_GEMM = 1


class QuantDtype(IntEnum):
    INT4 = 0


class IPEXWeightOnlyQuantizedLinear:
    @classmethod
    def from_weight(
        cls, qweight, scales, zero_points, in_features, out_features, qconfig=None, bias=None, group_size=-1,
        g_idx=None, quant_method=QuantMethod.GPTQ_GEMM, dtype=QuantDtype.INT4, **kwargs,
    ) -> Callable[[torch.Tensor], torch.Tensor]:  # fmt: skip
        need(qweight.shape == (in_features // 8, out_features), "eight inputs in a word")
        need(scales.shape == (in_features // group_size, out_features), "a scale for each group")
        need(qweight.dtype == torch.int32 and (quant_method, dtype) == (0, 0), "GPTQ, 4 bits")
        # in this method the zero points are taken to be 8, whatever is given
        numbers = torch.stack([(qweight >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1) - 8
        weight = numbers.float() * scales.float().repeat_interleave(group_size, 0)

        def call(x: torch.Tensor) -> torch.Tensor:
            y = x.float() @ weight
            return (y if bias is None else y + bias.float()).to(x.dtype)

        return call


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were here, until the test ends."""
    parts: dict[str, dict[str, Any]] = {
        "": {},
        ".llm": {},
        ".llm.modules": {"PagedAttention": PagedAttention, "GatedMLPMOE": GatedMLPMOE},
        ".llm.functional": {
            f.__name__: f for f in (rms_norm, add_rms_norm, rotary_embedding)
        },
        ".llm.quantization": {
            c.__name__: c for c in (IPEXWeightOnlyQuantizedLinear, QuantMethod, QuantDtype)
        },
    }  # fmt: skip
    for part, names in parts.items():
        module = ModuleType(NAME + part)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, NAME + part, module)
        parent, _, name = (NAME + part).rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    for own in ("ipex_attention", "ipex_ops"):
        monkeypatch.delitem(sys.modules, f"headrace.platforms.xpu.{own}", raising=False)
