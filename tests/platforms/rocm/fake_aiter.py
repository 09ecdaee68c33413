"""A stand-in for the package amd-aiter: the real one's modules and signatures (aiter_facts.json), the reference's
results. Every call is bound to the real signature first, and what the real functions insist on is insisted on."""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from headrace.platforms.queries import AttentionQuery, ExpertsQuery
from headrace.platforms.reference import experts, ops
from headrace.platforms.reference.attention import Plan, ReferenceAttention
from tests.platforms.rocm.aiter_facts import signature_of

HALVES = (torch.bfloat16, torch.float16)


def rms_norm(input: torch.Tensor, weight: torch.Tensor, epsilon: float, **_: Any) -> torch.Tensor:
    assert input.dim() == 2 and input.dtype in HALVES and weight.dtype == input.dtype
    assert input.stride(1) == 1
    return ops.rms_norm(input, weight, epsilon)


def add_rms_norm(
    out: torch.Tensor,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    **_: Any,
) -> None:
    assert input.dtype in HALVES and weight.dtype == input.dtype
    normed, total = ops.fused_add_rms_norm(input, residual_in, weight, epsilon)
    out.copy_(normed)
    residual_out.copy_(total)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def gated(out: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
        assert input.is_contiguous() and out.is_contiguous() and input.dtype in HALVES
        out.copy_(function(input))

    return gated


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    need_renorm: bool,
    **_: Any,
) -> None:
    assert topk_weights.dtype == torch.float32
    assert topk_indices.dtype == token_expert_indices.dtype == torch.int32
    assert token_expert_indices.shape == topk_indices.shape and gating_output.is_contiguous()
    weights, ids = experts.topk_softmax(gating_output, topk_weights.shape[1], need_renorm)
    topk_weights.copy_(weights)
    topk_indices.copy_(ids)


def _tiles(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    count, n, k = x.shape
    return x.view(count, n // rows, rows, k // columns, columns)


def shuffle_weight(x: torch.Tensor, layout: tuple[int, int], **_: Any) -> torch.Tensor:
    """Tiles of 16 rows and 32 columns, each of them in one piece: an order of its own, undone by fused_moe."""
    assert layout == (16, 16) and x.is_contiguous()
    assert x.shape[1] % 16 == 0 and x.shape[2] % 32 == 0
    made = _tiles(x, 16, 32).transpose(2, 3).contiguous().view(x.shape)
    made.is_shuffled = True  # type: ignore[attr-defined]
    return made


def _plain(x: torch.Tensor) -> torch.Tensor:
    assert getattr(x, "is_shuffled", False), "weights must be shuffled"
    count, n, k = x.shape
    return x.view(count, n // 16, k // 32, 16, 32).transpose(2, 3).reshape(x.shape)


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: enum.Enum,
    quant_type: enum.Enum,
    **rest: Any,
) -> torch.Tensor:
    assert hidden_states.dtype in HALVES and w1.dtype == w2.dtype == hidden_states.dtype
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert hidden_states.shape[0] and hidden_states.is_contiguous()
    assert (activation.name, quant_type.name) == ("Silu", "No")
    count, hidden, width = w2.shape
    assert w1.shape == (count, 2 * width, hidden) and width % (64 if width <= 192 else 128) == 0
    dtype = str(hidden_states.dtype).removeprefix("torch.")
    query = ExpertsQuery(count, topk_ids.shape[1], hidden, width, dtype)
    op = experts.ReferenceExperts(query, None)  # type: ignore[arg-type]
    return op(hidden_states, topk_weight, topk_ids, (_plain(w1), _plain(w2)))


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    **rest: Any,
) -> None:
    assert causal and all(rest[name] is None for name in ("q_descale", "k_descale", "v_descale"))
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    size, kv_heads, width = k.shape[1:]
    assert size >= 16 and size & (size - 1) == 0 and k.stride(3) == v.stride(3) == 1
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    counts = [after - before for before, after in pairwise(starts)]
    assert len(counts) == len(lengths) == len(block_table) and starts[-1] == len(q) == len(out)
    assert max(counts) <= max_seqlen_q and max(lengths) <= max_seqlen_k
    assert (max_seqlen_q == 1) == all(count == 1 for count in counts)
    window = 1 + window_size[0]
    dtype = str(q.dtype).removeprefix("torch.")
    shape = (q.shape[1], kv_heads, width, v.shape[3])
    query = AttentionQuery(*shape, dtype, dtype, softmax_scale, window=window, softcap=softcap)
    none = torch.empty(0, dtype=torch.int64)
    plan = Plan(len(lengths), len(q), starts, lengths, block_table.long(), none, none)
    op = ReferenceAttention(query, None)  # type: ignore[arg-type]
    op.attend(q, k.transpose(1, 2), v.transpose(1, 2), plan, out, sinks)


def mla(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    **_: Any,
) -> None:
    """Each request's queries are the last ones of its keys, in pages of one token."""
    assert q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16
    assert q.is_contiguous() and o.is_contiguous() and kv_buffer.is_contiguous()
    assert q.shape[1] in (16, 128) and q.shape[2] == kv_buffer.shape[3] == 576
    assert kv_buffer.shape[1:3] == (1, 1) and o.shape == (*q.shape[:2], 512)
    integers = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in integers)
    assert (kv_last_page_lens == 1).all() and qo_indptr[0] == kv_indptr[0] == 0
    starts, ends = qo_indptr.tolist(), kv_indptr.tolist()
    assert len(starts) == len(ends) == len(kv_last_page_lens) + 1 and starts[-1] == len(q)
    # the kernels read some behind the last one
    memory = kv_indices.untyped_storage().nbytes() // 4 - kv_indices.storage_offset()
    assert memory >= ends[-1] + 10_000
    assert max(after - before for before, after in pairwise(starts)) == max_seqlen_q
    for (first, stop), (low, high) in zip(pairwise(starts), pairwise(ends), strict=True):
        keys = kv_buffer[kv_indices[low:high].long(), 0, 0].float()
        scores = torch.einsum("qhd,kd->hqk", q[first:stop].float(), keys) * sm_scale
        count, length = stop - first, high - low
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        o[first:stop] = torch.einsum("hqk,kd->qhd", weights, keys[:, :512]).to(o.dtype)


@lru_cache(maxsize=1)
def get_meta_param(
    num_kv_splits: int | None, bs: int, total_kv: int, nhead: int, **_: Any
) -> tuple[int, torch.Tensor]:
    assert num_kv_splits is None and nhead in (16, 128) and total_kv >= bs
    return 2, torch.arange(0, 2 * (bs + 1), 2, dtype=torch.int32)


def mm(
    inp: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    assert inp.dtype in HALVES and weights.dtype == inp.dtype and inp.is_contiguous()
    return F.linear(inp, weights, bias)


class CustomAllreduce:
    """Ranks as processes of this host, over gloo."""

    def __init__(self, group: Any, device: torch.device, max_size: int, **_: Any) -> None:
        assert dist.get_backend(group) != "nccl" and isinstance(device, torch.device)
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        assert isinstance(store, dist.TCPStore), "handles are exchanged through one"
        self.disabled = dist.get_world_size(group) not in (2, 4, 6, 8)
        self._group, self._most = group, max_size

    def custom_all_reduce(self, input: torch.Tensor, **_: Any) -> torch.Tensor | None:
        size = input.numel() * input.element_size()
        if self.disabled or size % 16:
            return None
        assert size <= self._most, "beyond the buffer: the released package would write there"
        assert input.is_contiguous() and input.dtype in (*HALVES, torch.float32)
        total = input.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def close(self) -> None:
        self.disabled = True


CLASSES = {
    "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce": CustomAllreduce,
}

BODIES: dict[str, Callable[..., Any]] = {
    "aiter:rms_norm": rms_norm,
    "aiter:rmsnorm2d_fwd_with_add": add_rms_norm,
    "aiter:silu_and_mul": _gated(ops.silu_and_mul),
    "aiter:gelu_and_mul": _gated(ops.gelu_and_mul),
    "aiter:gelu_tanh_and_mul": _gated(ops.gelu_tanh_and_mul),
    "aiter:topk_softmax": topk_softmax,
    "aiter.fused_moe:fused_moe": fused_moe,
    "aiter.ops.shuffle:shuffle_weight": shuffle_weight,
    "aiter.mla:mla_decode_fwd": mla,
    "aiter.mla:mla_prefill_fwd": mla,
    "aiter.mla:get_meta_param": get_meta_param,
    "aiter.tuned_gemm:tgemm.mm": mm,
    "aiter.ops.triton.attention.unified_attention:unified_attention": unified_attention,
    "aiter.ops.triton.unified_attention:unified_attention": unified_attention,
}


def modules(entry: dict[str, Any], calls: Counter[str]) -> dict[str, ModuleType]:
    """The package's modules by name, with what one entry of aiter_facts.json has. `calls` counts by place."""
    made: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in made:
            made[name] = ModuleType(name)
            made[name].__path__ = []  # a package, whose parts are all here
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(module(parent), last, made[name])
        return made[name]

    for place, facts in entry["places"].items():
        if facts is None:
            continue
        name, _, path = place.partition(":")
        holder: Any = module(name)
        owner, _, attribute = path.rpartition(".")
        if owner:
            setattr(holder, owner, type(owner, (), {})())
            holder = getattr(holder, owner)
        if "enum" in facts:
            setattr(holder, attribute, enum.Enum(attribute, facts["enum"]))
        elif "methods" in facts:
            setattr(holder, attribute, _bound_class(place, facts["methods"], calls))
        else:
            setattr(holder, attribute, _bound(place, facts["parameters"], calls))
    return made


def _bound(place: str, parameters: list[dict[str, str]], calls: Counter[str]) -> Callable[..., Any]:
    signature, body = signature_of(parameters), BODIES[place]

    def function(*arguments: Any, **named: Any) -> Any:
        calls[place] += 1
        return body(**signature.bind(*arguments, **named).arguments)

    return function


def _bound_class(place: str, methods: dict[str, Any], calls: Counter[str]) -> type:
    """CLASSES[place], each of whose methods is bound to its signature first."""

    def bound(name: str, parameters: list[dict[str, str]]) -> Callable[..., Any]:
        signature, body = signature_of(parameters), getattr(CLASSES[place], name)

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            calls[place] += 1
            return body(self, **signature.bind(*arguments, **named).arguments)

        return method

    found = {name: bound(name, parameters) for name, parameters in methods.items()}
    return type(CLASSES[place].__name__, (CLASSES[place],), found)


def install(monkeypatch: Any, entry: dict[str, Any]) -> Counter[str]:
    """Make `import aiter` give the stand-in; returns the counter of its calls."""
    calls: Counter[str] = Counter()
    for name in [one for one in sys.modules if one == "aiter" or one.startswith("aiter.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules(entry, calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls
