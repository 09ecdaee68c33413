"""Paged attention: decodes with split keys, prompts and chunks in tiles. Contract: headrace.platforms.attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.platforms.attention import PagedAttention, Turn
from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import CANONICAL, KVFormat
from headrace.platforms.queries import AttentionQuery, RotaryQuery
from headrace.platforms.triton.attention_kernels import (
    combine_kernel,
    decode_kernel,
    turn_decode_kernel,
    turn_write_kernel,
    write_kernel,
)
from headrace.platforms.triton.attention_prefill_kernels import prefill_kernel
from headrace.platforms.triton.launch import Launcher, Launchers, launch_options, power_of_two

# Programs for each compute unit that decodes are split into, and the most parts of one sequence.
PROGRAMS_A_UNIT = 4
MOST_SPLITS = 64
# From so many programs a unit on there is no need to divide sequences, nor to make much of each program.
MANY_A_UNIT = 6
# Numbers of partial results that a warp combines at a time: 64 a thread.
COMBINED = 2048
# A part shorter than this costs more to start and combine than it saves.
KEYS_A_SPLIT = 64


@dataclass(slots=True)
class Plan:
    decodes: int  # requests with one query token, the first ones of the batch
    splits: int
    num_tokens: int
    slots: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    tiles: torch.Tensor | None  # [N, 2] int32; None without prompts
    block_size: int


class MixedPlan(Plan):
    """Of a step whose decodes run beside its prompts."""

    __slots__ = ()


def shape_options(query: AttentionQuery) -> dict[str, Any]:
    """Compile-time constants that both kernels share."""
    return {
        "GROUP": query.q_heads // query.kv_heads,
        "D": query.head_dim,
        "DV": query.v_head_dim,
        "SOFTCAP": query.softcap,
        "WINDOW": query.window,
        "SINKS": query.sinks,
        "D_PAD": power_of_two(query.head_dim, 16),
        "DV_PAD": power_of_two(query.v_head_dim, 16),
        # float32 products are exact to float32, not rounded to what matrix units take
        "PRECISION": "ieee" if query.dtype == "float32" else "tf32",
    }


def decode_options(
    query: AttentionQuery, runtime: DeviceRuntime, many: bool = False, beside: bool = False
) -> dict[str, Any]:
    """`many`: for so many sequences that each of them is one part. `beside`: beside prompts."""
    wide = max(query.head_dim, query.v_head_dim) > 128
    keys, warps, stages = (32, 4, 2) if wide else (64, 2, 3)
    if query.dtype == "float32":  # products on the ordinary units: all operands sit in registers
        keys, warps, stages = 16, 8, 1
    options = {
        **shape_options(query),
        "BLOCK_M": power_of_two(query.q_heads // query.kv_heads, 16),
        "BLOCK_N": keys,
        "num_warps": warps,
        "num_stages": stages,
        "LAST": True,  # the last program combines, not a kernel of its own
        "AHEAD": False,  # blocks of the next keys are looked up before they are needed
    }
    name = "decode_beside" if beside else "decode_many" if many else "decode"
    chosen = launch_options(name, query, runtime, options, dependent=True)
    return chosen | combined_at_once(query, chosen["num_warps"])


def turns_decodes(query: AttentionQuery, options: dict[str, Any]) -> bool:
    """Whether decode_kernel's program that combines may also be one that writes a key before it reads it."""
    whole = query.head_dim == query.v_head_dim == options["D_PAD"]
    return bool(whole and options["LAST"] and not query.sinks)


def combine_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    chosen = launch_options("combine", query, runtime, {"num_warps": 4}, dependent=True)
    shape = {"GROUP": query.q_heads // query.kv_heads, "DV": query.v_head_dim}
    shape["DV_PAD"] = power_of_two(query.v_head_dim, 16)
    return chosen | shape | combined_at_once(query, chosen["num_warps"])


def combined_at_once(query: AttentionQuery, warps: int) -> dict[str, int]:
    """Heads and parts: all heads of a group if that leaves 8 parts."""
    rows = COMBINED * warps // power_of_two(query.v_head_dim, 16)
    heads = min(power_of_two(query.q_heads // query.kv_heads), max(1, rows // 8))
    return {"HEADS": heads, "PARTS": min(MOST_SPLITS, max(1, rows // heads))}


def prefill_options(
    query: AttentionQuery, runtime: DeviceRuntime, beside: bool = False
) -> dict[str, Any]:
    """`beside`: with decodes beside, to which registers and memory of each unit are left."""
    group = query.q_heads // query.kv_heads
    wide = max(query.head_dim, query.v_head_dim) > 128
    rows, keys, warps, stages = (64, 32, 8, 2) if wide else (128, 32, 8, 3)
    if query.dtype == "float32":
        rows, keys, warps, stages = 16, 32, 8, 1
    options = {
        **shape_options(query),
        "BLOCK_M": max(rows, power_of_two(group, 16)),
        "BLOCK_N": keys,
        "num_warps": warps,
        "num_stages": stages,
        "TOGETHER": "async_copy" in runtime.info.features,
        "PROGRAMS": 0,  # for each unit, that take tiles in turn; 0: a program for each tile
    }
    name = "prefill_beside" if beside else "prefill"
    chosen = launch_options(name, query, runtime, options, dependent=True)
    # a device's tile may be too small for the heads of one token
    return chosen | {"BLOCK_M": max(chosen["BLOCK_M"], power_of_two(group, 16))}


def write_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    heads, size, wide = query.kv_heads, query.head_dim, query.v_head_dim
    options = {"HEADS": heads, "D": size, "DV": wide, "H_PAD": power_of_two(heads), "num_warps": 4}
    options |= {"D_PAD": power_of_two(size, 16), "DV_PAD": power_of_two(wide, 16)}
    return launch_options("write", query, runtime, options, dependent=True)


def turn_options(query: AttentionQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    half = query.head_dim // 2
    heads = max(query.q_heads, query.kv_heads)
    # about 512 pairs for each program
    options = {"HEADS": min(power_of_two(heads), max(1, 512 // power_of_two(half)))}
    chosen = launch_options("turn_write", query, runtime, options | {"num_warps": 4}, True)
    shape = {"Q_HEADS": query.q_heads, "KV_HEADS": query.kv_heads}
    return {**chosen, **shape, "HALF": half, "WIDTH": power_of_two(half)}


class TritonAttention(PagedAttention):
    graph = GraphSupport.ALWAYS

    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._write = Launchers(write_kernel, write_options(query, runtime))
        options = turn_options(query, runtime)
        self._turn = Launchers(turn_write_kernel, options)
        parts = (-(-heads // options["HEADS"]) for heads in (query.q_heads, *[query.kv_heads] * 2))
        self._turn_blocks = sum(parts)  # of q, k and v
        options, many = (decode_options(query, runtime, many) for many in (False, True))
        self._decode = Launchers(decode_kernel, options)
        self._decode_many = Launchers(decode_kernel, many)
        self._turns_decodes = turns_decodes(query, options)
        self._turn_decode = Launchers(turn_decode_kernel, options)
        self._turn_decode_many = Launchers(turn_decode_kernel, many)
        self._combine = Launcher(combine_kernel, combine_options(query, runtime))
        self._decode_beside = Launchers(decode_kernel, decode_options(query, runtime, beside=True))
        # of prompts alone, and of those with decodes beside them
        prompts = [prefill_options(query, runtime, beside) for beside in (False, True)]
        self._prompts = [Launchers(prefill_kernel, options) for options in prompts]
        self._tile_tokens = [options["BLOCK_M"] // options["GROUP"] for options in prompts]
        self.overlap = prompts[0]["PDL"]
        self._parts = query.kv_heads  # of the query heads, to each of which a program belongs
        self._programs = PROGRAMS_A_UNIT * runtime.info.units
        self._many = MANY_A_UNIT * runtime.info.units // query.kv_heads  # sequences
        self._no_sinks = torch.zeros(1, device=runtime.device)
        # Programs that ended, for each request and KV head; 0 between launches. Sequences are divided only while
        # there are fewer of them than programs. One stream at a time may run this instance.
        self._done = torch.zeros(self._programs, dtype=torch.int32, device=runtime.device)

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(CANONICAL, preference=10, preferred_block_size=32),)

    # -- once a step --------------------------------------------------------------------------------------------------

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        """Nothing is copied for decodes: the batch's own tensors, which have fixed addresses where `static` is given,
        say it all, and the number of splits depends on the sizes of tensors only. Prompts have their tiles copied: with
        `static` to a fixed address, and as many as so many tokens of so many requests can need."""
        table = batch.block_tables[group]
        only_decodes = batch.num_decode_reqs == batch.num_reqs
        # padding rows are decodes of one token
        decodes = len(batch.seq_lens) if only_decodes else batch.num_decode_reqs
        beside = self.overlap and static is None and not only_decodes and decodes > 0
        return (MixedPlan if beside else Plan)(
            decodes,
            self.splits(decodes, table.shape[1] * batch.block_size),
            decodes if only_decodes else batch.num_tokens,
            batch.slot_mappings[group],
            batch.seq_lens,
            batch.query_start_loc,
            table,
            None if only_decodes else self._tiles(batch, static, self._tile_tokens[beside]),
            batch.block_size,
        )

    def splits(self, requests: int, keys: int) -> int:
        """Parts that each sequence of at most `keys` keys is divided into."""
        if self.query.window:
            keys = min(keys, self.query.window)
        programs = max(requests, 1) * self._parts
        most = min(MOST_SPLITS, self._programs // programs, keys // KEYS_A_SPLIT)
        return power_of_two(most + 1) // 2 if most > 1 else 1

    def _tiles(self, batch: BatchView, static: Any | None, size: int) -> torch.Tensor:
        first = batch.num_decode_reqs
        starts = batch.query_start_loc_host[first : batch.num_reqs + 1]
        counts = -(-np.diff(starts) // size)
        request = np.repeat(np.arange(len(counts)), counts)
        order = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
        token = order * size
        lengths = batch.seq_lens_host[first : batch.num_reqs]
        work = (lengths - np.diff(starts))[request] + token
        by_work = np.argsort(-work, kind="stable")  # long ones first: short ones fill the end
        used = len(request)
        count = used if static is None else batch.num_tokens // size + batch.num_reqs
        tiles = self.runtime.pinned_empty((count, 2), torch.int32)
        host = tiles.numpy()
        host[:used, 0], host[:used, 1] = request[by_work] + first, token[by_work]
        # behind the last request's end: of no token
        host[used:] = batch.num_reqs - 1, batch.num_tokens
        if static is None:
            return tiles.to(self.runtime.device, non_blocking=True)
        fixed: torch.Tensor = static.get("tiles", (count, 2), torch.int32)
        return fixed.copy_(tiles, non_blocking=True)

    # -- once a layer -------------------------------------------------------------------------------------------------

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Plan,
    ) -> None:
        if not k.shape[0]:
            return
        self._write(SIZE=plan.block_size)(
            (k.shape[0], 1, 1), k, v, k_cache, v_cache, plan.slots,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
        )  # fmt: skip

    def turns(self, rotary: RotaryQuery) -> bool:
        query = self.query
        whole = rotary.head_dim == rotary.rotary_dim == query.head_dim == query.v_head_dim
        return whole and rotary.is_neox and rotary.dtype == query.dtype

    def turn_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        turn: Turn,
        caches: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
    ) -> torch.Tensor:
        if q.shape[0]:
            # without norms something must stand in for them
            norms = turn.norms or (turn.cos_sin, turn.cos_sin)
            self._turn(SIZE=plan.block_size, NORM=turn.norms is not None)(
                (q.shape[0], self._turn_blocks, 1),
                q, k, v, turn.positions, turn.cos_sin, *norms, *caches, plan.slots,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                *caches[0].stride()[:3], *caches[1].stride()[:3], turn.eps,
            )  # fmt: skip
        return q

    def turn_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        turn: Turn,
        caches: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
    ) -> torch.Tensor:
        query, tokens = self.query, q.shape[0]
        if not self._turns_decodes or plan.tiles is not None or plan.decodes != tokens:
            return super().turn_and_attend(q, k, v, turn, caches, plan)
        out = torch.empty(tokens, *q.shape[1:], dtype=q.dtype, device=q.device)
        if tokens:
            partial, lse = self._partial(out, plan)
            norms = turn.norms or (turn.cos_sin, turn.cos_sin)
            made = self._turn_decode_many if tokens >= self._many else self._turn_decode
            made(SIZE=plan.block_size, NORM=turn.norms is not None)(
                (plan.splits, query.kv_heads, tokens),
                out, partial, lse, self._done, q, k, v, turn.positions, turn.cos_sin, *norms,
                plan.slots, *caches, plan.seq_lens, plan.table, self._no_sinks,
                out.stride(0), out.stride(1), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
                v.stride(0), v.stride(1), *caches[0].stride()[:3], *caches[1].stride()[:3],
                plan.table.stride(0), plan.splits, query.scale, turn.eps,
            )  # fmt: skip
        return out

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
            out = torch.empty(
                q.shape[0], query.q_heads, query.v_head_dim, dtype=q.dtype, device=q.device
            )
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :].zero_()
        strides = (
            out.stride(0), out.stride(1), q.stride(0), q.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], plan.table.stride(0),
        )  # fmt: skip
        if sinks is None:
            sinks = self._no_sinks
        caches = (k_cache, v_cache)
        if plan.tiles is not None:
            prompts, count = self._prompts[isinstance(plan, MixedPlan)], len(plan.tiles)
            programs = self._programs_of(prompts.options, count)
            if k_cache.stride() != v_cache.stride():
                raise ValueError("keys and values need equal strides, as views of one memory have")
            prompts(SIZE=plan.block_size)(
                (programs, self._parts, 1),
                out, q, *caches, plan.tiles, plan.starts, plan.seq_lens, plan.table, sinks,
                *strides[:7], plan.table.stride(0), count, query.scale,
            )  # fmt: skip
        if plan.decodes:
            self._attend_decodes(out, q, caches, plan, sinks, strides)
        return out

    def _programs_of(self, options: Mapping[str, Any], tiles: int) -> int:
        """Programs for each KV head that prompts of so many tiles are divided over."""
        if not options["PROGRAMS"]:
            return tiles
        each: int = options["PROGRAMS"] * self.runtime.info.units // self._parts
        return min(tiles, max(1, each))

    def _partial(self, out: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the parts' results and the logarithms of their sums."""
        if (
            plan.splits == 1
        ):  # not used, but of the same dtype: another would be another kernel to compile
            return self._no_sinks, self._no_sinks
        parts = (plan.decodes, self.query.q_heads, plan.splits)
        lse = torch.empty(parts, dtype=torch.float32, device=out.device)
        return lse.new_empty(*parts, self.query.v_head_dim), lse

    def _attend_decodes(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
        sinks: torch.Tensor,
        strides: tuple[int, ...],
    ) -> None:
        query, splits = self.query, plan.splits
        partial, lse = self._partial(out, plan)
        grid = (splits, self._parts, plan.decodes)
        made = self._decode_many if plan.decodes >= self._many else self._decode
        beside = isinstance(plan, MixedPlan)
        if beside:
            made = self._decode_beside
        made(SIZE=plan.block_size, BESIDE=beside)(
            grid, out, partial, lse, self._done, q, *caches, plan.seq_lens, plan.table, sinks,
            *strides, splits, query.scale,
        )  # fmt: skip
        if splits > 1 and not self._decode.options["LAST"]:
            grid = (plan.decodes, self._parts, 1)
            self._combine(grid, out, partial, lse, splits, out.stride(0), out.stride(1))
