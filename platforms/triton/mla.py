"""Multi-head latent attention: paged attention whose values are a part of its keys, read once for both.

Contract: headrace.platforms.attention, for queries with `latent`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headrace.platforms.attention import PagedAttention
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.queries import AttentionQuery, RotaryQuery
from headrace.platforms.triton.attention import (
    PROGRAMS_A_UNIT,
    Plan,
    TritonAttention,
    combine_options,
    combined_at_once,
)
from headrace.platforms.triton.attention_kernels import combine_kernel
from headrace.platforms.triton.launch import Launcher, Launchers, launch_options, power_of_two
from headrace.platforms.triton.mla_kernels import (
    latent_decode_kernel,
    latent_prefill_kernel,
    latent_write_kernel,
)

# Query heads of a program: rows of its sums, each of them 512 numbers wide.
MOST_HEADS = 32


def heads_at_once(query: AttentionQuery) -> int:
    """The most query heads, up to MOST_HEADS, that divide all of them evenly; half as many where numbers are wide."""
    heads, most = query.q_heads, MOST_HEADS // (2 if query.dtype == "float32" else 1)
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)


def _shape(query: AttentionQuery) -> dict[str, Any]:
    return {
        "GROUP": heads_at_once(query),
        "D": query.head_dim,
        "DV": query.v_head_dim,
        "DV_PAD": power_of_two(query.v_head_dim, 16),
        "REST_PAD": power_of_two(query.head_dim - query.v_head_dim, 16),
        # float32 products are exact to float32, not rounded to what matrix units take
        "PRECISION": "ieee" if query.dtype == "float32" else "tf32",
    }


def _parted(query: AttentionQuery) -> AttentionQuery:
    """The query as kernels see it that know KV heads: each part of the query heads has one of its own."""
    return replace(query, kv_heads=query.q_heads // heads_at_once(query))


def decode_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    shape = _shape(query)
    rows = power_of_two(shape["GROUP"], 16)
    # a stage of 32 keys is 36 KiB: devices without asynchronous copies have room for half of it
    # and blocks, which say where keys lie, are read two stages ahead of their use
    keys, warps, stages = 32, 4 if rows == 16 else 8, 4
    if "async_copy" not in runtime.info.features:
        keys, stages = 16, 1
    if query.dtype == "float32":  # products on the ordinary units: all operands sit in registers
        keys, warps, stages = 16, 8, 1
    options = {
        **shape,
        "BLOCK_M": rows,
        "BLOCK_N": keys,
        "num_warps": warps,
        "num_stages": stages,
        "LAST": True,  # the last program combines, not a kernel of its own
    }
    chosen = launch_options("latent_decode", query, runtime, options, dependent=True)
    return chosen | combined_at_once(_parted(query), chosen["num_warps"])


def prefill_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    shape = _shape(query)
    rows, keys, warps, stages = 32, 32, 4, 2
    if "tma" in runtime.info.features:  # these have more than twice the shared memory of others
        rows, keys, warps, stages = 64, 32, 8, 2
    elif "async_copy" not in runtime.info.features:
        keys, stages = 16, 1
    if query.dtype == "float32":
        rows, keys, warps, stages = 16, 16, 8, 1
    options = {
        **shape,
        "BLOCK_M": max(rows, power_of_two(shape["GROUP"], 16)),
        "BLOCK_N": keys,
        "num_warps": warps,
        "num_stages": stages,
    }
    return launch_options("latent_prefill", query, runtime, options)


def write_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    options = {"D": query.head_dim, "D_PAD": power_of_two(query.head_dim), "num_warps": 4}
    return launch_options("latent_write", query, runtime, options, dependent=True)


class TritonMLA(TritonAttention):
    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        PagedAttention.__init__(self, query, runtime)
        self._write = Launchers(latent_write_kernel, write_options(query, runtime))
        self._decode = Launchers(latent_decode_kernel, decode_options(query, runtime))
        self._combine = Launcher(combine_kernel, combine_options(_parted(query), runtime))
        self._prefill = Launchers(latent_prefill_kernel, prefill_options(query, runtime))
        options = self._prefill.options
        self._tile_tokens = [options["BLOCK_M"] // options["GROUP"]]
        self.overlap = False
        self._parts = query.q_heads // options["GROUP"]
        self._programs = PROGRAMS_A_UNIT * runtime.info.units
        # programs that ended, as in TritonAttention
        self._done = torch.zeros(self._programs, dtype=torch.int32, device=runtime.device)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        """v is a part of k, and v_cache of k_cache: there is nothing else to write."""
        if k.shape[0]:
            strides = (k.stride(0), k_cache.stride(0), k_cache.stride(2))
            self._write(SIZE=plan.block_size)((k.shape[0], 1, 1), k, k_cache, plan.slots, *strides)

    def turns(self, rotary: RotaryQuery) -> bool:
        return False

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = self.query
        if out is None:
            shape = (q.shape[0], query.q_heads, query.v_head_dim)
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :].zero_()
        strides = (
            out.stride(0), out.stride(1), q.stride(0), q.stride(1),
            k_cache.stride(0), k_cache.stride(2), plan.table.stride(0),
        )  # fmt: skip
        if plan.decodes:
            self._attend_latent(out, q, k_cache, plan, strides)
        if plan.tiles is not None:
            self._prefill(SIZE=plan.block_size)(
                (len(plan.tiles), self._parts, 1),
                out, q, k_cache, plan.tiles, plan.starts, plan.seq_lens, plan.table,
                *strides, query.scale,
            )  # fmt: skip
        return out

    def _attend_latent(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        plan: Plan,
        strides: tuple[int, ...],
    ) -> None:
        query, splits = self.query, plan.splits
        partial, lse = self._partial(out, plan)
        self._decode(SIZE=plan.block_size)(
            (splits, self._parts, plan.decodes),
            out, partial, lse, self._done, q, k_cache, plan.seq_lens, plan.table,
            *strides, splits, query.scale,
        )  # fmt: skip
        if splits > 1 and not self._decode.options["LAST"]:
            grid = (plan.decodes, self._parts, 1)
            self._combine(grid, out, partial, lse, splits, out.stride(0), out.stride(1))


def attention_of(query: AttentionQuery, runtime: DeviceRuntime) -> TritonAttention:
    """The implementation for the query."""
    return (TritonMLA if query.latent else TritonAttention)(query, runtime)
