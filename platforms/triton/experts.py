"""Mixture of experts. Contract: headrace.platforms.linear, ExpertsImpl. The kernels say how they divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import ExpertsQuery
from headrace.platforms.triton.experts_kernels import (
    count_kernel,
    down_kernel,
    down_row_kernel,
    gate_up_kernel,
    gate_up_row_kernel,
    sort_kernel,
    sum_kernel,
)
from headrace.platforms.triton.experts_tiled_kernels import tiled_down_kernel, tiled_gate_up_kernel
from headrace.platforms.triton.launch import (
    Launcher,
    TensorDescriptor,
    Tiled,
    launch_options,
    power_of_two,
    warps_for,
)

# Up to so many tokens hardly share an expert: each pair reads its own.
ROW_TOKENS = 2
# So many tokens, and pairs of a token and an expert, find their experts' tiles without sorting. An expert has at most
# one pair of each token, so one tile of 16 rows holds all of its pairs.
FEW_TOKENS = 16
FEW_PAIRS = 256
# Pairs that one program sorts: all of them at first, then so many that tens of programs share the work.
ONE_CHUNK = 4096
CHUNK = 2048
# Pairs that a single program takes in at a time, by how many there are -> its warps.
SORTED_AT_ONCE = {1024: 8, 2048: 16}
# Rows of a tile, by the pairs that an expert has on average.
TILE_ROWS = (16, 32, 64, 128)

# Launch parameters by rows of a tile, until a device has its own: BLOCK_N, BLOCK_K, warps, stages.
GATE_UP = {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 4, 3), 128: (64, 64, 8, 3)}
DOWN = {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
# of few tokens, whose experts are few: narrow tiles, so that there are programs for every unit
GATE_UP_FEW, DOWN_FEW = (32, 128, 2, 4), (64, 128, 4, 3)
# Numbers of gate's rows that a program for one pair holds, where those are a power of two wide.
WIDE = 4096
# float32 products on the ordinary units: all operands sit in registers
EXACT = (32, 32, 4, 1)
# A device may have sorted pairs multiplied by experts_tiled_kernels.py: TILED. PROGRAMS of a unit that share all tiles;
# 0 = one for each tile.
UNTILED = {"TILED": False, "SWAP": False, "AHEAD": 0, "PROGRAMS": 0}
# Bytes that addresses and rows of a tensor are multiples of where its tiles are copied.
ALIGNED = 16


def tile_sizes(query: ExpertsQuery) -> tuple[int, ...]:
    """Rows that tiles may have."""
    return TILE_ROWS[:1] if query.dtype == "float32" else TILE_ROWS


def tile_rows(query: ExpertsQuery, tokens: int) -> int:
    """Rows of a tile: twice the pairs that an expert has on average, so that most need one tile only."""
    average, sizes = tokens * query.top_k / query.experts, tile_sizes(query)
    return next((rows for rows in sizes if rows >= 2 * average), sizes[-1])


def most_tokens(query: ExpertsQuery, rows: int) -> int:
    """The most tokens for which tiles have so many rows."""
    return rows * query.experts // (2 * query.top_k)


def most_tiles(query: ExpertsQuery, pairs: int, rows: int) -> int:
    """How many tiles sorted pairs can need: every expert that is used may fill its last one with one pair."""
    used = min(pairs, query.experts)
    return used + (pairs - used) // rows


def can_tile(query: ExpertsQuery, runtime: DeviceRuntime) -> bool:
    """Whether the device copies tiles by itself, and this release of Triton knows how to ask for it."""
    rows = (query.hidden, query.intermediate)
    return (
        "tma" in runtime.info.features
        and TensorDescriptor is not None
        and not any(width * getattr(torch, query.dtype).itemsize % ALIGNED for width in rows)
    )


def product_options(
    kernel: str, query: ExpertsQuery, runtime: DeviceRuntime, rows: int, few: bool = False
) -> dict[str, Any]:
    """Of "gate_up" and "down" with tiles of `rows` rows; `few`: pairs are not sorted. Only where tiles can be copied
    the options that a device may change have "TILED" among them."""
    table, one = (GATE_UP, GATE_UP_FEW) if kernel == "gate_up" else (DOWN, DOWN_FEW)
    chosen = one if few else table[rows]
    columns, depth, warps, stages = EXACT if query.dtype == "float32" else chosen
    options: dict[str, Any] = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}
    # float32 products are exact to float32, not rounded to what matrix units take
    options["PRECISION"] = "ieee" if query.dtype == "float32" else "tf32"
    options |= {"num_warps": warps, "num_stages": stages}
    if not few and can_tile(query, runtime):
        options |= UNTILED
    name = f"experts_{kernel}{'_few' if few else ''}"
    launch = launch_options(name, query, runtime, options, dependent=True)
    launch |= {"FEW": few, "PAIRS": power_of_two(FEW_TOKENS * query.top_k) if few else 1}
    if launch.get("TILED"):
        launch |= {"FLAT": launch["PROGRAMS"] > 0, "E": query.experts}
    if kernel == "gate_up":
        launch |= {"TOP_K": query.top_k, "KIND": query.activation}
    return launch | _even(query.hidden if kernel == "gate_up" else query.intermediate, launch)


def row_options(kernel: str, query: ExpertsQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    """Of "gate_up_row" and "down_row", for up to ROW_TOKENS tokens."""
    k = power_of_two(query.top_k)
    rows, depth, warps = (4, 512, 4) if kernel == "gate_up_row" else (2, max(64, 1024 // k), 4)
    if power_of_two(query.hidden) == query.hidden <= WIDE and kernel == "gate_up_row":
        rows, depth = max(1, WIDE // query.hidden), query.hidden
    if query.dtype == "float32":
        depth //= 2
    options = {"BLOCK_N": rows, "BLOCK_K": depth, "num_warps": warps, "num_stages": 1}
    chosen = launch_options(f"experts_{kernel}", query, runtime, options, dependent=True)
    if kernel == "down_row":
        return chosen | {"TOP_K": query.top_k, "K_PAD": k} | _whole(query.intermediate, chosen)
    return chosen | {"TOP_K": query.top_k, "KIND": query.activation} | _whole(query.hidden, chosen)


def _even(depth: int, options: dict[str, Any]) -> dict[str, Any]:
    return {"EVEN": depth % options["BLOCK_K"] == 0}


def _whole(depth: int, options: dict[str, Any]) -> dict[str, Any]:
    return _even(depth, options) | {"WHOLE": options["BLOCK_K"] >= depth}


def sort_options(query: ExpertsQuery, runtime: DeviceRuntime, at_once: int) -> dict[str, Any]:
    """Of the two kernels that sort pairs. `at_once`: a single program does it, 0 = many."""
    # a histogram has a bin at least for each thread of a warp
    bins = power_of_two(query.experts + 1, 64)
    size, block = (ONE_CHUNK, at_once) if at_once else (CHUNK, 2048)
    options = {"BLOCK": block, "num_warps": SORTED_AT_ONCE.get(at_once, 8)}
    chosen = launch_options("experts_sort", query, runtime, options, dependent=True)
    chosen["BLOCK"] = min(size, chosen["BLOCK"])  # a program looks at its own chunk only
    return chosen | {"ONE": at_once > 0, "E": query.experts, "BINS": bins, "CHUNK": size}


def sum_options(query: ExpertsQuery, runtime: DeviceRuntime) -> dict[str, Any]:
    block = min(power_of_two(query.hidden), 1024)
    options = {"BLOCK": block, "num_warps": warps_for(block)}
    chosen = launch_options("experts_sum", query, runtime, options, dependent=True)
    return {**chosen, "TOP_K": query.top_k}


@dataclass(slots=True)
class Work:
    """What both products look at. `tiles`: at most `most` of them. h [P, INTER], y [P, H]."""

    x: torch.Tensor
    ids: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    most: int
    h: torch.Tensor
    y: torch.Tensor


class Product:
    """One of the two products with its launch options, for tiles of one height."""

    def __init__(
        self, name: str, query: ExpertsQuery, runtime: DeviceRuntime, rows: int, few: bool
    ) -> None:
        self.options = options = product_options(name, query, runtime, rows, few)
        self._tiled, self._gate_up = options.get("TILED", False), name == "gate_up"
        self._sizes = query.hidden, query.intermediate
        plain, tiled = (
            (gate_up_kernel, tiled_gate_up_kernel)
            if self._gate_up
            else (down_kernel, tiled_down_kernel)
        )
        self._launch = Launcher(tiled if self._tiled else plain, options)
        self._blocks = triton.cdiv(self._sizes[self._gate_up], options["BLOCK_N"])
        self._most = options.get("PROGRAMS", 0) * runtime.info.units or 1 << 30

    def __call__(self, work: Work, w: torch.Tensor) -> None:
        if self._tiled:
            self._of_tiles(work, w)
            return
        grid = (self._blocks, work.most, 1)
        sorted_pairs = (work.ids, work.order, work.tiles, work.ids.numel())
        if self._gate_up:
            x = work.x
            self._launch(grid, x, w, work.h, *sorted_pairs, x.stride(0), *self._sizes)
        else:
            self._launch(grid, work.h, w, work.y, *sorted_pairs, *self._sizes)

    def _of_tiles(self, work: Work, w: torch.Tensor) -> None:
        grid = (min(self._most, self._blocks * work.most), 1, 1)
        rows, columns, depth = (self.options[f"BLOCK_{name}"] for name in "MNK")
        hidden, size = self._sizes
        given: tuple[Any, ...]
        if self._gate_up:
            if self.options["SWAP"]:
                weights = Tiled(w, 1, columns, depth)
            else:
                weights = Tiled(w.view(-1, 2, size, hidden), 1, 2, columns, depth)
            given = (work.x, w, work.h, work.order, work.tiles, weights, work.x.stride(0))
        else:
            tiles = (Tiled(work.h, rows, depth), Tiled(w, 1, columns, depth))
            given = (w, work.y, work.order, work.tiles, *tiles)
        self._launch(grid, *given, hidden, size)


class TritonExperts(ExpertsImpl):
    def __init__(self, query: ExpertsQuery, runtime: DeviceRuntime) -> None:
        super().__init__(query, runtime)
        self._dtype = getattr(torch, query.dtype)
        options = row_options("gate_up_row", query, runtime)
        self._gate_up_row = Launcher(gate_up_row_kernel, options)
        self._gate_up_blocks = triton.cdiv(query.intermediate, options["BLOCK_N"])
        options = row_options("down_row", query, runtime)
        self._down_row = Launcher(down_row_kernel, options)
        self._down_blocks = triton.cdiv(query.hidden, options["BLOCK_N"])
        self._products = {rows: self._made(rows, False) for rows in tile_sizes(query)}
        self._few = self._made(16, True)
        self._warm = False
        sorts = {block: sort_options(query, runtime, block) for block in (0, *SORTED_AT_ONCE)}
        self._count = Launcher(count_kernel, sorts[0])
        self._bins = sorts[0]["BINS"]
        self._sort = {block: Launcher(sort_kernel, options) for block, options in sorts.items()}
        options = sum_options(query, runtime)
        self._sum = Launcher(sum_kernel, options)
        self._sum_blocks = triton.cdiv(query.hidden, options["BLOCK"])

    def _made(self, rows: int, few: bool) -> tuple[Product, Product]:
        """Both products for tiles of `rows` rows."""
        made = (self.query, self.runtime, rows, few)
        return Product("gate_up", *made), Product("down", *made)

    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        packed = tuple(self._laid(w.to(self._dtype).contiguous()) for w in (w13, w2))
        if not self._warm and self._sum.compiled:
            self._warm = True
            self._compile(packed)
        return packed

    @staticmethod
    def _laid(w: torch.Tensor) -> torch.Tensor:
        return w.clone() if w.data_ptr() % ALIGNED else w

    def _compile(self, packed: Any) -> None:
        """Tiles of every height and sorts of every size once, now: no step of a server should be the first to need
        one."""
        query, tokens = self.query, FEW_TOKENS + 1
        x = torch.zeros(tokens, query.hidden, dtype=self._dtype, device=packed[0].device)
        weights = torch.zeros(tokens, query.top_k, device=x.device)
        ids = torch.arange(query.top_k, dtype=torch.int32, device=x.device).repeat(tokens, 1)
        for rows in tile_sizes(query):
            self._rows((x, weights, ids), packed, torch.empty_like(x), rows)
        for pairs in (*SORTED_AT_ONCE, ONE_CHUNK + 1):
            ids_of = torch.zeros(pairs, dtype=torch.int32, device=x.device)
            self._sorted(ids_of, pairs, TILE_ROWS[0], most_tiles(query, pairs, TILE_ROWS[0]))
        few = slice(0, FEW_TOKENS)
        self._rows((x[few], weights[few], ids[few]), packed, torch.empty_like(x[few]))

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        tokens = x.shape[0]
        weights, ids = weights.contiguous(), ids.contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if 0 < tokens <= ROW_TOKENS:
            self._row(x, weights, ids, packed, out)
        elif tokens:
            self._rows((x, weights, ids), packed, out)
        return out

    def _row(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        packed: Any,
        out: torch.Tensor,
    ) -> None:
        query = self.query
        tokens, hidden, size = x.shape[0], query.hidden, query.intermediate
        pairs = tokens * query.top_k
        h = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
        grid = (self._gate_up_blocks, pairs, 1)
        self._gate_up_row(grid, x, packed[0], h, ids, x.stride(0), hidden, size)
        grid = (self._down_blocks, tokens, 1)
        self._down_row(grid, h, packed[1], weights, ids, out, hidden, size)

    def _rows(
        self, routed: tuple[torch.Tensor, ...], packed: Any, out: torch.Tensor, rows: int = 0
    ) -> None:
        """`rows` of a tile; 0 = what fits the number of tokens."""
        (x, weights, ids), query = routed, self.query
        tokens, hidden = x.shape[0], query.hidden
        pairs = tokens * query.top_k
        if tokens <= FEW_TOKENS and pairs <= FEW_PAIRS:
            order, tiles, count = ids, ids, pairs
            gate_up, down = self._few
        else:
            rows = rows or tile_rows(query, tokens)
            count = most_tiles(query, pairs, rows)
            order, tiles = self._sorted(ids, pairs, rows, count)
            gate_up, down = self._products[rows]
        h = torch.empty(pairs, query.intermediate, dtype=x.dtype, device=x.device)
        y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
        work = Work(x, ids, order, tiles, count, h, y)
        gate_up(work, packed[0])
        down(work, packed[1])
        self._sum((tokens, self._sum_blocks, 1), y, weights, out, hidden)

    def _sorted(
        self, ids: torch.Tensor, pairs: int, rows: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs in the order of their experts [P], and the tiles [1 + count, 3]; int32."""
        one = pairs <= ONE_CHUNK
        chunks = 1 if one else triton.cdiv(pairs, CHUNK)
        blocks = tuple(SORTED_AT_ONCE) if one else (0,)
        sort = self._sort[next((block for block in blocks if pairs <= block), blocks[-1])]

        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids.device)

        counts = integers(2, chunks, self._bins)
        order, tiles = integers(pairs), integers(1 + count, 3)
        if not one:
            self._count((chunks, 1, 1), ids, counts, pairs)
        sort((chunks, 1, 1), ids, counts, order, tiles, pairs, rows)
        return order, tiles
