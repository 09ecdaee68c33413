"""Stand-ins for FlashInfer and FlashAttention: the real packages' signatures (vendor_facts.json), the reference's
results. Every call is bound to the real signature first, and what the real functions insist on is insisted on.

Their place in the platform needs the shared attention, whose kernels write the cache: here the same by PyTorch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.cuda.platform import CudaPlatform
from headrace.platforms.graph import GraphSupport
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.attention import Plan, ReferenceAttention
from tests.platforms.cuda.vendor_facts import load, signature_of

HALVES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
SHARED = "headrace.platforms.triton.attention"
OURS = ("flash_attention", "flashinfer")


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    starts: list[int],
    lengths: list[int],
    table: torch.Tensor,
    out: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The reference, over caches [P, H, S, D]. The last request ends with the last row of q."""
    k, v = caches
    assert k.stride(3) == v.stride(3) == q.stride(2) == 1 and q.dtype in HALVES
    assert len(starts) == len(lengths) + 1 == len(table) + 1 and starts[-1] == len(q) == len(out)
    dtype = str(q.dtype).removeprefix("torch.")
    shape = (q.shape[1], k.shape[1], k.shape[3], v.shape[3])
    query = AttentionQuery(*shape, dtype, dtype, **options)
    none = torch.empty(0, dtype=torch.int64)
    plan = Plan(len(lengths), len(q), starts, lengths, table.long(), none, none)
    op = ReferenceAttention(query, None)  # type: ignore[arg-type]
    return op.attend(q, k, v, plan, out)


# -- FlashInfer -------------------------------------------------------------------------------------------------------


class _Wrapper:
    """A plan lies in memory that is written by the next one."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, **rest: Any) -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        self._integers = torch.zeros(0)
        self._init = rest
        self._planned: dict[str, Any] = {}

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert int_workspace_buffer.numel() >= 8 << 20
        self._integers = int_workspace_buffer

    def _keep(
        self,
        starts: torch.Tensor,
        ends: torch.Tensor,
        blocks: torch.Tensor,
        last: torch.Tensor,
        rest: dict[str, Any],
    ) -> None:
        assert all(one.dtype == torch.int32 and one.dim() == 1 for one in (starts, ends, last))
        assert blocks.dtype == torch.int32 and len(blocks) == int(ends[-1])
        size = rest["page_size"]
        assert ((last > 0) & (last <= size)).all() and len(last) == len(ends) - 1
        assert rest["num_qo_heads"] % rest["num_kv_heads"] == 0
        lengths = [
            (b - a - 1) * size + int(n) for (a, b), n in zip(_pairs(ends), last, strict=True)
        ]
        table = torch.zeros(len(last), max(b - a for a, b in _pairs(ends)), dtype=torch.int32)
        for row, (a, b) in enumerate(_pairs(ends)):
            table[row, : b - a] = blocks[a:b]
        # one integer of the workspace is enough to tell whose plan it holds
        self._integers[:1] += 1
        mark = int(self._integers[0])
        kept = {"starts": starts.tolist(), "lengths": lengths, "table": table, "mark": mark}
        self._planned = {**rest, **kept}

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, ...], **rest: Any
    ) -> torch.Tensor:
        plan, (k, v), out = self._planned, paged_kv_cache, rest["out"]
        assert plan["mark"] == int(self._integers[0]), "the plan was overwritten"
        assert plan["q_data_type"] == q.dtype and plan["kv_data_type"] == k.dtype == v.dtype
        assert k.stride() == v.stride() and out.is_contiguous() and out.dtype == q.dtype
        assert (plan["num_qo_heads"], plan["num_kv_heads"]) == (q.shape[1], k.shape[1])
        assert (plan["head_dim"], plan["page_size"]) == (q.shape[2], k.shape[2])
        return attend(
            q,
            (k, v),
            plan["starts"],
            plan["lengths"],
            plan["table"],
            out,
            scale=plan["sm_scale"],
            window=plan["window_left"] + 1,
            softcap=plan["logits_soft_cap"],
        )


def _pairs(ends: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(ends.tolist()))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        **rest: Any,
    ) -> None:
        assert rest.pop("causal") is True and self._init.keys() == {"backend"}
        rest["head_dim"] = rest.pop("head_dim_qk")
        assert rest["head_dim"] in (64, 128, 256)
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._keep(qo_indptr, *pages, rest)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, **rest: Any
    ) -> None:
        assert self._init["use_tensor_cores"] and self._init["backend"] == "fa2"
        if self._init.get("use_cuda_graph"):
            places = [self._init[f"paged_kv_{name}_buffer"] for name in _BUFFERS]
            given = indptr, indices, last_page_len
            assert len(places[0]) == len(indptr) and len(places[2]) == len(last_page_len)
            for place, one in zip(places, given, strict=True):
                place[: len(one)] = one
            indptr, indices, last_page_len = places[0], places[1][: len(indices)], places[2]
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(starts, indptr, indices, last_page_len, rest)


_BUFFERS = ("indptr", "indices", "last_page_len")


# -- FlashAttention ---------------------------------------------------------------------------------------------------


def _window(window_size: tuple[int, int]) -> int:
    left, right = window_size
    assert (left < 0 and right < 0) or right == 0
    return left + 1


def _options(scale: float, causal: bool, window: tuple[int, int], softcap: float) -> dict[str, Any]:
    assert causal
    return {"scale": scale, "window": _window(window), "softcap": softcap}


def decode_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    assert q.dim() == 4 and q.shape[1] == 1 and k_cache.shape[1] % 256 == 0
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    out, starts = torch.empty(q[:, 0].shape, dtype=q.dtype), list(range(len(q) + 1))
    options = _options(softmax_scale, causal, window_size, softcap)
    lengths = cache_seqlens.tolist()
    return attend(q[:, 0], caches, starts, lengths, block_table, out, **options).unsqueeze(1)


def varlen_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    assert k.shape[1] % 256 == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    assert starts[0] == int(cu_seqlens_k[0]) == 0
    assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q and max(lengths) <= max_seqlen_k
    caches, out = (k.transpose(1, 2), v.transpose(1, 2)), torch.empty(q.shape, dtype=q.dtype)
    options = _options(softmax_scale, causal, window_size, softcap)
    return attend(q, caches, starts, lengths, block_table, out, **options)


def with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert k_cache.shape[1] <= 32, "larger blocks are read with what lies behind the end"
    starts = cu_seqlens_q.tolist()
    assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
    caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    out = torch.empty(q.shape, dtype=q.dtype)
    options = _options(softmax_scale, causal, window_size, softcap)
    return attend(q, caches, starts, cache_seqlens.tolist(), page_table, out, **options)


BODIES: dict[str, tuple[str, Any]] = {
    "flashinfer/prefill.py:": ("flashinfer", BatchPrefillWithPagedKVCacheWrapper),
    "flashinfer/decode.py:": ("flashinfer", BatchDecodeWithPagedKVCacheWrapper),
    "flash_attn/flash_attn_interface.py:flash_attn_with_kvcache": ("flash_attn", decode_2),
    "flash_attn/flash_attn_interface.py:flash_attn_varlen_func": ("flash_attn", varlen_2),
    "hopper/flash_attn_interface.py:flash_attn_with_kvcache": (
        "flash_attn_interface",
        with_kvcache_3,
    ),
}


# -- in the place of the packages -------------------------------------------------------------------------------------


def install(monkeypatch: Any) -> Counter[str]:
    """Make imports of the packages give the stand-ins; returns the counter of their calls, by place."""
    calls: Counter[str] = Counter()
    places = {place: found for entry in load() for place, found in entry["places"].items()}
    modules: dict[str, ModuleType] = {}
    for start, (module, body) in BODIES.items():
        holder = modules.setdefault(module, ModuleType(module))
        if isinstance(body, type):
            methods = {
                place.rpartition(".")[2]: _bound(place, found, body, calls)
                for place, found in places.items()
                if place.startswith(start)
            }
            setattr(holder, body.__name__, type(body.__name__, (body,), methods))
        else:
            name = start.partition(":")[2]
            setattr(holder, name, _function(start, places[start], body, calls))
    for name, module in {**modules, SHARED: _shared_attention()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"headrace.platforms.cuda.{name}", raising=False)
    return calls


def forget() -> None:
    """The platform's modules that were imported over the stand-ins."""
    for name in OURS:
        sys.modules.pop(f"headrace.platforms.cuda.{name}", None)


def _bound(place: str, found: Any, body: type, calls: Counter[str]) -> Callable[..., Any]:
    signature, function = signature_of(found), getattr(body, place.rpartition(".")[2])

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        calls[place] += 1
        return function(self, **signature.bind(*arguments, **named).arguments)

    return method


def _function(place: str, found: Any, body: Any, calls: Counter[str]) -> Callable[..., Any]:
    signature = signature_of(found)

    def function(*arguments: Any, **named: Any) -> Any:
        calls[place] += 1
        return body(**signature.bind(*arguments, **named).arguments)

    return function


def _shared_attention() -> ModuleType:
    """In place of the shared attention, whose kernel writes the cache: the same by PyTorch."""

    @dataclass
    class Plan:
        decodes: int
        splits: int
        num_tokens: int
        slots: torch.Tensor
        seq_lens: torch.Tensor
        starts: torch.Tensor
        table: torch.Tensor
        tiles: torch.Tensor | None
        block_size: int

    class TritonAttention(PagedAttention):
        graph = GraphSupport.ALWAYS

        def write(self, k, v, k_cache, v_cache, plan):
            live = (plan.slots >= 0).nonzero().squeeze(1)
            where = SimpleNamespace(tokens=live, slots=plan.slots[live])
            ReferenceAttention.write(self, k, v, k_cache, v_cache, where)  # type: ignore[arg-type]

    module = ModuleType(SHARED)
    module.Plan, module.TritonAttention = Plan, TritonAttention  # type: ignore[attr-defined]
    return module


class Event:
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        assert self.recorded == self.waited, "waited twice for one plan"
        self.waited = self.recorded + 1


def runtime(arch: str = "sm_90") -> Any:
    return SimpleNamespace(
        info=CudaPlatform.describe(arch),
        device=CPU,
        event=Event,
        pinned_empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )


class Static:
    """Buffers of fixed address, as the engine gives them to a plan that will be replayed."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = self.tensors.setdefault(name, torch.empty(shape, dtype=dtype))
        assert made.shape == shape and made.dtype == dtype
        return made
