"""What a runtime promises the engine: memory, streams, events, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.platforms.batch import HostArgs
from headrace.platforms.collectives import GroupSpec
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import EagerGraphs, GraphBackend, GraphKey
from headrace.platforms.groups import open_group
from headrace.platforms.ops import Ops
from headrace.platforms.queries import ActivationQuery, LinearQuery, NormQuery
from headrace.platforms.reference.checks.base import NothingToCheck, close, require, same
from headrace.platforms.registry import Registry

RuntimeCheck = Callable[[DeviceRuntime, Registry], None]

MIB = 1 << 20
HIDDEN, INNER, MOST = 32, 64, 8


def allocator_gives_zeros_and_counts(runtime: DeviceRuntime, registry: Registry) -> None:
    allocator = runtime.allocator()
    before = allocator.stats()
    for tag in ("conformance a", "conformance b"):
        memory = allocator.reserve(MIB, tag)
        require(memory.dtype == torch.uint8, f"reserved memory is {memory.dtype}, not uint8")
        require(memory.shape == (MIB,), f"{tuple(memory.shape)} bytes instead of {MIB}")
        require(memory.device.type == runtime.device.type, f"memory is on {memory.device}")
        require(not bool(memory.cpu().any()), "reserved memory is not zero")
        memory.fill_(255)
        del memory
        # what is given back must come again as zeros
        allocator.free(tag)
        again = allocator.reserve(MIB, tag)
        require(not bool(again.cpu().any()), "memory reserved again is not zero")
        del again
    wanted = {**before, "conformance a": MIB, "conformance b": MIB}
    require(allocator.stats() == wanted, f"stats say {allocator.stats()}, not {wanted}")
    for tag in ("conformance a", "conformance b"):
        allocator.free(tag)
    require(allocator.stats() == before, "freed memory is still counted")


def allocator_sleeps_at_its_addresses(runtime: DeviceRuntime, registry: Registry) -> None:
    allocator = runtime.allocator()
    allocator.allow_sleep()
    before = allocator.stats()
    cache, weights = "conformance cache", "conformance weights"
    memory = allocator.reserve(3 * MIB + 5, cache)
    try:
        if reason := allocator.stays_awake(cache):
            raise NothingToCheck(f"no tag can sleep, because {reason}")
        address = memory.data_ptr()
        memory.fill_(255)
        runtime.synchronize()
        require(allocator.sleep(cache, keep=False) > 0, "nothing was given back")
        allocator.wake(cache)
        require(memory.data_ptr() == address, "the memory has other addresses after sleep")
        require(not bool(memory.cpu().any()), "memory that slept is not zero")
        if not allocator.stays_awake(weights):
            _weights_sleep(runtime, weights)
    finally:
        del memory
        for tag in (cache, weights):
            allocator.free(tag)
    require(allocator.stats() == before, "freed memory is still counted")


def _weights_sleep(runtime: DeviceRuntime, tag: str) -> None:
    allocator = runtime.allocator()

    def made(first: int) -> list[torch.Tensor]:
        whole = torch.arange(first, first + MIB, dtype=torch.int32, device=runtime.device)
        return [whole[8:24].view(4, 4).t(), whole]

    (part, whole), (part_wanted, wanted) = made(1), made(1)
    allocator.adopt([part, whole], tag)
    addresses = part.data_ptr(), whole.data_ptr()
    same(part, part_wanted, "a view of weights that moved")
    same(whole, wanted, "weights that moved")
    runtime.synchronize()
    allocator.sleep(tag, keep=True)
    allocator.wake(tag)
    same(part, part_wanted, "a view of weights that were kept")
    same(whole, wanted, "weights that were kept")
    runtime.synchronize()
    allocator.sleep(tag, keep=False)
    read_again = made(2)
    allocator.adopt(read_again, tag)
    same(whole, made(2)[1], "weights that were read again")
    found = tuple(tensor.data_ptr() for tensor in read_again)
    require(found == addresses, "weights that were read again have other addresses")


def memory_is_known(runtime: DeviceRuntime, registry: Registry) -> None:
    memory = runtime.memory()
    require(memory.total > 0, "the device's memory is not known")
    require(0 <= memory.free <= memory.total, f"{memory.free} bytes free of {memory.total}")
    runtime.reset_peak_memory()
    held = torch.ones(32 * MIB, dtype=torch.uint8, device=runtime.device)
    runtime.synchronize()
    peak = runtime.peak_memory()
    require(peak == 0 or peak >= held.numel(), f"a peak of {peak} with {held.numel()} allocated")
    require(runtime.read_bandwidth() >= 0, "a negative bandwidth")


def pinned_memory_is_copied(runtime: DeviceRuntime, registry: Registry) -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        host = runtime.pinned_empty((3, 5), dtype)
        require(host.dtype == dtype and tuple(host.shape) == (3, 5), f"{host.dtype} {host.shape}")
        require(host.device.type == "cpu", f"pinned memory is on {host.device}")
        host.copy_(torch.arange(15).view(3, 5))
        there = host.to(runtime.device, non_blocking=True)
        back = runtime.pinned_empty((3, 5), dtype)
        back.copy_(there, non_blocking=True)
        runtime.synchronize()
        same(back, torch.arange(15).view(3, 5).to(dtype), f"{dtype} there and back")


def events_follow_their_stream(runtime: DeviceRuntime, registry: Registry) -> None:
    stream = runtime.stream()
    x = torch.arange(1 << 16, dtype=torch.float32).to(runtime.device)
    runtime.synchronize()
    back = runtime.pinned_empty(tuple(x.shape), torch.float32)
    with runtime.use_stream(stream):
        y = x
        for _ in range(20):
            y = y + 1
        back.copy_(y, non_blocking=True)
        event = runtime.event()
        event.record()
    event.synchronize()
    require(event.query(), "an event that was waited for is not complete")
    same(back, torch.arange(1 << 16) + 20.0, "what lies before the event in its stream")


def every_dtype_computes(runtime: DeviceRuntime, registry: Registry) -> None:
    require(bool(runtime.info.dtypes), "the device names no dtype")
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    for name in runtime.info.dtypes:
        x = drawn.to(getattr(torch, name))
        got = x.to(runtime.device) @ x.to(runtime.device)
        close(got.float(), (x.float() @ x.float()), name, f"a product in {name}")
    runtime.seed(7)


def a_group_of_one(runtime: DeviceRuntime, registry: Registry) -> None:
    with open_group(GroupSpec(0, 1, ""), runtime, registry) as group:
        require((group.rank, group.world) == (0, 1), f"rank {group.rank} of {group.world}")
        x = torch.arange(4.0).to(runtime.device)
        for result in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)):
            same(result, torch.arange(4.0), "a group of one and its input")
        group.barrier()


def graphs_replay_what_they_captured(runtime: DeviceRuntime, registry: Registry) -> None:
    with torch.inference_mode(), runtime.use_stream(runtime.stream()):
        _capture_change_replay(runtime.graphs(), runtime, registry)


def eager_graphs_call_their_body(runtime: DeviceRuntime, registry: Registry) -> None:
    with torch.inference_mode(), runtime.use_stream(runtime.stream()):
        _capture_change_replay(EagerGraphs(), runtime, registry)


def _capture_change_replay(
    backend: GraphBackend, runtime: DeviceRuntime, registry: Registry
) -> None:
    """A feed-forward block over static buffers, at two sizes captured in one session, largest first."""
    ops, device = Ops(registry, runtime.info, runtime), runtime.device
    up = ops.bind("linear", LinearQuery(HIDDEN, 2 * INNER, "float32"))
    down = ops.bind("linear", LinearQuery(INNER, HIDDEN, "float32"))
    act = ops.bind("silu_and_mul", ActivationQuery(INNER, "float32"))
    norm = ops.bind("fused_add_rms_norm", NormQuery(HIDDEN, "float32"))

    def drawn(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)

    packed = (
        up.pack(drawn(0, 2 * INNER, HIDDEN), None),
        down.pack(drawn(1, HIDDEN, INNER), None),
    )
    scale = drawn(2, HIDDEN)
    x, residual, out = (torch.zeros(MOST, HIDDEN, device=device) for _ in range(3))

    def body(size: int) -> Callable[[], None]:
        def run() -> None:
            y = down(act(up(x[:size], packed[0])), packed[1])
            out[:size].copy_(norm(y, residual[:size].clone(), scale, 1e-5)[0])

        return run

    def host(size: int) -> HostArgs:
        return HostArgs(np.ones(size, np.int32), np.arange(size + 1, dtype=np.int32))

    graphs: dict[int, Any] = {}
    with backend.session():
        for size in (MOST, 3):
            body(size)()  # kernels are loaded and tuned outside of the capture
            graphs[size] = backend.capture(GraphKey("decode", size, size), body(size), host(size))
    for seed, size in ((11, MOST), (12, 3), (13, MOST)):
        x.copy_(drawn(seed, MOST, HIDDEN))
        residual.copy_(drawn(seed + 10, MOST, HIDDEN))
        body(size)()
        want = out.clone()
        out[:size].fill_(torch.nan)
        graphs[size].replay(host(size))
        runtime.synchronize()
        same(out, want, f"{size} rows replayed and computed")
    for graph in graphs.values():
        graph.release()


def _needs_graphs(runtime: DeviceRuntime, registry: Registry) -> None:
    if isinstance(runtime.graphs(), EagerGraphs):
        raise NothingToCheck("this runtime has no graphs")
    graphs_replay_what_they_captured(runtime, registry)


MEMORY: dict[str, RuntimeCheck] = {
    "the allocator gives zeros and counts": allocator_gives_zeros_and_counts,
    "a tag sleeps at its addresses": allocator_sleeps_at_its_addresses,
    "memory is known": memory_is_known,
    "pinned memory is copied": pinned_memory_is_copied,
    "events follow their stream": events_follow_their_stream,
    "every dtype computes": every_dtype_computes,
}
GRAPHS: dict[str, RuntimeCheck] = {
    "graphs replay what they captured": _needs_graphs,
    "eager graphs call their body": eager_graphs_call_their_body,
}
COLLECTIVES: dict[str, RuntimeCheck] = {"a group of one": a_group_of_one}
