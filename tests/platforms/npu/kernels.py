"""CPU kernels for the `npu` ops that do what torch_npu's documentation says of each, and refuse what it rules out.

They compute in float32 and round once; products are torch's own. Written from the documentation, not from the
implementations that call them; a limit that it names is an assertion here, so that a call which a device would refuse
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.platforms.npu.schemas import SCHEMAS

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
FRACTAL_NZ = 29

_libraries: list[torch.library.Library] = []  # alive as long as what they register


def register(key: str = "CPU") -> None:
    """Once a process: the kernels, and the schemas too where torch_npu has not registered them."""
    if _libraries:
        return
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    library = torch.library.Library("npu", "FRAGMENT")
    _libraries.append(library)
    for schema in SCHEMAS:
        if f"npu::{schema.partition('(')[0].partition('.')[0]}" not in known:
            library.define(schema)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, key)


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, ...]:
    assert x.dtype in FLOATS and gamma.dtype == x.dtype and 2 <= x.dim() <= 8
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(x.dtype), inverse


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, ...]:
    assert x1.dtype == x2.dtype and x1.shape == x2.shape
    total = (x1.float() + x2.float()).to(x1.dtype)
    return (*rms_norm(total, gamma, epsilon), total)


def _rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    assert mode == "interleave"
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def rotary_mul(
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    assert x.dim() == r1.dim() == r2.dim() == 4 and x.dtype == r1.dtype == r2.dtype
    batch, tokens, heads, size = x.shape  # the layout BSND
    assert size < 896 and size % 2 == 0 and batch < 1000 and heads < 1000
    assert r1.shape == r2.shape == (1, tokens, 1, size), "1S1D is what both modes take"
    wide = x.float()
    return (r1.float() * wide + r2.float() * _rotate(wide, rotary_mode)).to(x.dtype)


def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    assert layout == "BSND" and rotary_mode == "half"
    assert query.dtype == key.dtype == cos.dtype == sin.dtype
    assert query.shape[-1] == key.shape[-1] == cos.shape[-1] and query.shape[-1] in (64, 128)
    assert query.shape[:2] == key.shape[:2] == cos.shape[:2] and cos.shape[2] == 1
    assert query.numel() and key.numel(), "empty tensors are not taken"
    for x in (query, key):  # the op works in place
        x.copy_(cos * x + sin * _rotate(x, "half"))
    return query.clone(), key.clone()


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(x.dtype)


def geglu(
    x: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.float().chunk(2, dim=dim)
    gate, other = (left, right) if activate_left else (right, left)
    activated = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (activated * other).to(x.dtype), activated.to(x.dtype)


def moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, ...]:
    assert x.dim() == 2 and x.dtype in FLOATS and finished is None and 0 < k <= x.shape[1] <= 1024
    probabilities = x.float().softmax(-1)
    ids = probabilities.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    rows = torch.arange(x.shape[0] * k).view(k, -1).t()
    return probabilities.gather(1, ids).to(x.dtype), ids.int(), rows.int()


def moe_init_routing_v2(
    x: torch.Tensor, expert_idx: torch.Tensor, *, active_num: int = -1, expert_num: int = -1,
    expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: Any = (), row_idx_type: int = 0, drop_pad_mode: int = 0, **rest: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert not any(value is not None and value != -1 for value in rest.values()), rest
    assert x.dim() == 2 and expert_idx.dim() == 2 and expert_idx.dtype == torch.int32
    assert expert_tokens_num_flag and expert_tokens_num_type == 1 and quant_mode == -1
    assert list(active_expert_range) == [0, expert_num] and not drop_pad_mode and not row_idx_type
    tokens, top_k = expert_idx.shape
    assert active_num in (-1, 0, tokens * top_k)
    flat = expert_idx.view(-1)
    assert int(flat.min()) >= 0 and int(flat.max()) < expert_num
    order = flat.sort(stable=True).indices  # row of the result -> place in expert_idx
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))  # the "gather" kind: for each place its row
    counts = torch.bincount(flat, minlength=expert_num)
    return (
        x[order // top_k],
        places.int(),
        counts.long(),
        x.new_empty(len(order), dtype=torch.float32),
    )


def grouped_matmul(
    x: list[torch.Tensor], weight: list[torch.Tensor], *, group_list: torch.Tensor | None = None,
    split_item: int = 0, group_type: int | None = None, group_list_type: int = 0, **rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    assert not any(rest.values()), rest
    assert len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0
    rows, matrices = x[0], weight[0]
    assert rows.dim() == 2 and matrices.dim() == 3 and rows.dtype == matrices.dtype
    assert rows.shape[-1] < 65536 and matrices.shape[-1] < 65536
    assert group_list is not None and group_list.dtype == torch.int64 and group_list_type == 1
    assert 1 < len(group_list) == len(matrices) <= 1024
    counts = group_list.tolist()
    assert sum(counts) == len(rows)
    parts = rows.split(counts)
    products = [F.linear(part, matrix.t()) for part, matrix in zip(parts, matrices, strict=True)]
    return [torch.cat(products)]


def moe_finalize_routing(
    rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
    src_to_dst: torch.Tensor,
    export: torch.Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> torch.Tensor:
    assert skip1 is None and skip2 is None and bias is None and export is None
    assert drop_pad_mode == 0 and scales.dtype == rows.dtype and src_to_dst.dtype == torch.int32
    tokens, top_k = scales.shape
    assert len(src_to_dst) == len(rows) == tokens * top_k
    out = torch.zeros(tokens, rows.shape[1])
    for i in range(top_k):
        out += scales[:, i, None].float() * rows[src_to_dst[i * tokens : (i + 1) * tokens].long()]
    return out.to(rows.dtype)


def format_cast(x: torch.Tensor, acl_format: int, **_kinds: Any) -> torch.Tensor:
    """Another order in memory, which only the device sees; "NZ" wants its 16 x 16 tiles filled."""
    assert acl_format == FRACTAL_NZ and x.is_contiguous() and x.dtype in HALVES
    assert x.shape[-1] % 16 == 0 and x.shape[-2] % 16 == 0
    return x.clone()


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str = "PA_NZ",
    **rest: Any,
) -> None:
    assert not any(rest.values()) and cache_mode == "Norm"
    for x in (key, value, key_cache, value_cache):
        assert x.is_contiguous() and x.dtype == key.dtype
    blocks, size, heads, width = key_cache.shape
    assert key.shape == (len(slot_mapping), heads, width)
    slots = slot_mapping.long()
    assert int(slots.min()) >= 0 and int(slots.max()) < blocks * size, "there is no slot to skip"
    real = slots[slots >= size]  # what lies in the dummy block means nothing
    assert len(real.unique()) == len(real), "of equal slots it is not known whose token is kept"
    key_cache.view(-1, heads, width)[slots] = key
    value_cache.view(-1, heads, value_cache.shape[-1])[slots] = value


_masks: dict[int, bool] = {}  # by address: the comparison takes longer than the attention


def _is_causal(mask: torch.Tensor) -> bool:
    if mask.data_ptr() not in _masks:
        _masks.clear()
        _masks[mask.data_ptr()] = torch.equal(mask, torch.ones_like(mask).triu(1))
    return _masks[mask.data_ptr()]


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert not any(value for value in rest.values()), rest
    assert input_layout == "TND" and query.dtype in HALVES
    assert all(x.is_contiguous() and x.dtype == query.dtype for x in (query, key, value))
    tokens, heads, size = query.shape
    kv_heads = num_key_value_heads
    assert heads == num_heads <= 256 and heads % kv_heads == 0 and heads // kv_heads <= 64
    assert size <= 512 and size % 16 == 0 and kv_heads * size <= 65535
    assert key.shape == value.shape and key.dim() == 3
    assert key.shape[1:] == (block_size, kv_heads * size) and key.numel() < 2**31
    assert 128 <= block_size <= 512 and block_size % 128 == 0
    assert sparse_mode in (3, 4) and atten_mask is not None and atten_mask.dtype == torch.int8
    assert atten_mask.shape == (2048, 2048) and _is_causal(atten_mask), "the causal mask"
    ends, lengths = list(actual_seq_lengths), list(actual_seq_lengths_kv)
    assert len(ends) == len(lengths) and ends[-1] == tokens and ends == sorted(ends)
    assert block_table is not None and block_table.dtype == torch.int32
    assert block_table.shape[0] == len(ends)
    assert block_table.shape[1] >= max(-(-n // block_size) for n in lengths)
    if sparse_mode == 3:
        pre_tokens, next_tokens = 2**31 - 1, 0
    out = torch.empty_like(query)
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        start = ends[i - 1] if i else 0
        count = end - start
        assert 0 < count <= length
        blocks = block_table[i, : -(-length // block_size)].long()
        keys, values = (
            x[blocks].view(-1, kv_heads, size)[:length].float().transpose(0, 1)
            for x in (key, value)
        )
        group = heads // kv_heads
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        scores = query[start:end].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        # both corners to the bottom right: how far a key is behind (or before) its query
        behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
        scores.masked_fill_((behind > pre_tokens) | (-behind > next_tokens), float("-inf"))
        out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    return out, torch.zeros(1)


def fused_infer_attention_score_out(
    *tensors: torch.Tensor, workspace: torch.Tensor | None = None, out: Any = None, **rules: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    assert workspace is not None and workspace.numel() and len(out) == 2
    result, lse = fused_infer_attention_score(*tensors, **rules)
    return out[0].copy_(result), out[1].copy_(lse)


def fused_infer_attention_score_get_max_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_rules: Any
) -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary_pos_emb,
    "npu_swiglu": swiglu,
    "npu_geglu": geglu,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_finalize_routing": moe_finalize_routing,
    "npu_format_cast": format_cast,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score.out": fused_infer_attention_score_out,
    "_npu_fused_infer_attention_score_get_max_workspace": (
        fused_infer_attention_score_get_max_workspace
    ),
}
