"""Collectives of a group of several ranks. Each rank runs these in a process of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.collectives import Collectives
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import EagerGraphs, GraphKey
from headrace.platforms.reference.checks.base import require, same

# Elements of the sums that the self-test takes: one, odd, less and more than what one thread or block moves at once.
SIZES = (1, 3, 8, 257, 4096, 50_001)
ROUNDS = 3  # in a row: libraries take turns between buffers


def check_group(group: Collectives, runtime: DeviceRuntime, rank: int, world: int) -> None:
    """CheckFailed when a rank sees something else than every rank should see."""
    require((group.rank, group.world) == (rank, world), f"rank {group.rank} of {group.world}")
    device = runtime.device
    for name in runtime.info.dtypes:
        dtype = getattr(torch, name)
        parts = [torch.arange(6, dtype=dtype).view(2, 3) + 10 * r for r in range(world)]
        x = parts[rank].to(device)
        total = sum(parts[1:], parts[0])
        same(group.all_reduce(x.clone()), total, f"the sum of {name}")
        same(group.all_reduce(x.clone().t()), total.t(), f"the sum of {name}, a strided tensor")
        for dim in (0, 1, -1):
            same(group.all_gather(x, dim), torch.cat(parts, dim), f"{name} gathered along {dim}")
        strided = torch.cat([part.t() for part in parts], 0)
        same(group.all_gather(x.t(), 0), strided, f"{name} gathered, a strided tensor")
        same(group.broadcast(x.clone(), 1), parts[1], f"{name} of rank 1")
    ids = torch.full((4,), rank, dtype=torch.int64, device=device)
    same(group.broadcast(ids, 0), torch.zeros(4).long(), "ids of rank 0")
    large = torch.full((1 << 20,), float(rank + 1), device=device)
    whole = float(world * (world + 1) // 2)
    same(group.all_reduce(large), torch.full((1 << 20,), whole), "a large sum")
    self_test(group, runtime)
    group.barrier()


def self_test(group: Collectives, runtime: DeviceRuntime) -> str:
    """What a start asks of a group before it serves: sums, gathers and broadcasts whose results are known, exactly.

    Returns what was done, for people. A group that says it is safe to capture and is not is told so by its attribute;
    whatever else is wrong is raised, CheckFailed mostly, but at the end: the other ranks would wait for one that had
    stopped before.
    """
    begun = time.perf_counter()
    steps: list[Callable[[], None]] = []
    for name, size in itertools.product(runtime.info.dtypes, SIZES):
        asked = group, runtime, getattr(torch, name), size
        steps += [partial(_sums, *asked), partial(_gathers, *asked)]
    steps += [partial(_broadcasts, group, runtime, src) for src in (0, group.world - 1)]
    failures = []
    for step in steps:
        try:
            step()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    said = ""
    if group.capture_safe and not isinstance(runtime.graphs(), EagerGraphs):
        try:
            _captured(group, runtime)
        except Exception as error:  # steps can do without graphs
            group.capture_safe = False
            said = f", but not inside a graph: {error}".partition("\n")[0]
    return f"known sums of {group.world} ranks, {time.perf_counter() - begun:.2f} s{said}"


def _part(rank: int, size: int, turn: int) -> torch.Tensor:
    """What a rank gives: whole numbers from -3 to 3, unlike its neighbours' and those of another turn, so that their
    sums over any usual number of ranks are whole in every dtype and tell a part that is missing, late or elsewhere."""
    return ((torch.arange(size) * 5 + rank * 3 + turn * 2) % 7 - 3).float()


def _total(world: int, size: int, turn: int) -> torch.Tensor:
    return torch.stack([_part(rank, size, turn) for rank in range(world)]).sum(0)


def _sums(group: Collectives, runtime: DeviceRuntime, dtype: torch.dtype, size: int) -> None:
    parts = [_part(group.rank, size, turn).to(dtype).to(runtime.device) for turn in range(ROUNDS)]
    totals = [group.all_reduce(part) for part in parts]
    for turn, total in enumerate(totals):
        same(total, _total(group.world, size, turn).to(dtype), f"the sum of {size} {dtype}")


def _gathers(group: Collectives, runtime: DeviceRuntime, dtype: torch.dtype, size: int) -> None:
    parts = [_part(rank, 2 * size, 1).to(dtype).view(2, size) for rank in range(group.world)]
    mine = parts[group.rank].to(runtime.device)
    same(group.all_gather(mine), torch.cat(parts, -1), f"{size} {dtype} gathered")


def _broadcasts(group: Collectives, runtime: DeviceRuntime, src: int) -> None:
    ids = _part(group.rank, 5, src).to(torch.int64).to(runtime.device)
    same(group.broadcast(ids, src), _part(src, 5, src).to(torch.int64), f"ids of rank {src}")


def _captured(group: Collectives, runtime: DeviceRuntime) -> None:
    """A sum inside a graph and what rank 0 has of it, as a decode step has them: over static buffers, replayed with
    other contents."""
    dtype, size = getattr(torch, runtime.info.dtypes[0]), 256
    x = torch.zeros(size, dtype=dtype, device=runtime.device)
    out = torch.zeros_like(x)

    def body() -> None:
        out.copy_(group.broadcast(group.all_reduce(x.clone())))

    backend, host = runtime.graphs(), HostArgs(np.ones(1, np.int32), np.arange(2, dtype=np.int32))
    with torch.inference_mode(), runtime.use_stream(runtime.stream()):
        with backend.session():
            body()
            graph = backend.capture(GraphKey("decode", 1, 1), body, host)
        try:
            for turn in range(ROUNDS):
                x.copy_(_part(group.rank, size, turn).to(dtype))
                out.fill_(torch.nan)
                graph.replay(host)
                runtime.synchronize()
                same(out, _total(group.world, size, turn).to(dtype), "a sum in a graph")
        finally:
            graph.release()
