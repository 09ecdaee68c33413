"""The allocator that can sleep, over a compiled stand-in for the driver whose memory is real and counted."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from headrace.platforms.torch_device import allocator as allocators
from headrace.platforms.torch_device import vmm
from headrace.platforms.torch_device.allocator import TorchAllocator, host_memory
from headrace.platforms.torch_device.vmm import CUDA, HIP, Driver, Region, VmmError
from tests.platforms.torch_device.stand_in import GRAIN, Module, StandIn, build

HOST = torch.device("cpu")


@pytest.fixture(params=[CUDA, HIP], ids=["cuda", "hip"])
def stand_in(request, tmp_path, monkeypatch):
    """A library of its own for each test: what is not given back is seen."""
    monkeypatch.setattr(vmm, "PIECE", 4 * GRAIN)
    monkeypatch.setattr(allocators, "PIECE", 4 * GRAIN)
    made = StandIn(build(request.param, tmp_path), request.param)
    yield made
    assert made.held() == dict.fromkeys(("reserved", "mapped", "handles"), 0) and made.used == 0


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


@pytest.fixture
def allocator(stand_in):
    made = TorchAllocator(HOST, stand_in.driver)
    made.allow_sleep()
    assert made.stays_awake("kv") == "" and not any(stand_in.held().values())
    yield made
    for tag in ("kv", "weights"):
        made.free(tag)


def test_a_region_comes_in_pieces_and_keeps_its_addresses(stand_in):
    region = Region(stand_in.driver(), 9 * GRAIN + 1)
    assert region.nbytes == 10 * GRAIN and region.address % GRAIN == 0 and stand_in.used == 0
    stand_in.log()
    region.grow(1)
    assert stand_in.log() == "Create Map SetAccess" and region.mapped == 4 * GRAIN
    region.grow(9 * GRAIN + 1)
    assert stand_in.log() == "Create Map SetAccess Create Map SetAccess"
    assert stand_in.used == region.mapped == 10 * GRAIN
    region.memory.fill_(7)
    address = region.memory.data_ptr()
    assert address == region.address
    assert region.drop() == 10 * GRAIN
    again = " Free Reserve" if stand_in.api.prefix == "hip" else ""
    assert stand_in.log() == " ".join(["Unmap Release"] * 3) + again
    assert stand_in.used == 0 and region.mapped == 0 and region.drop() == 0
    region.grow(10 * GRAIN)
    region.memory.fill_(9)
    assert region.memory.data_ptr() == address and int(region.memory.long().sum()) == 90 * GRAIN
    region.close()


@pytest.mark.parametrize("call", ["Create", "Map", "SetAccess"])
@pytest.mark.parametrize("which", [1, 3])
def test_a_call_that_fails_leaves_nothing_behind(stand_in, call, which):
    region = Region(stand_in.driver(), 12 * GRAIN)
    stand_in.fail(call, which)
    with pytest.raises(VmmError, match=rf"Mem{call}: told to fail"):
        region.grow(12 * GRAIN)
    assert stand_in.used == 0 == region.mapped
    region.grow(12 * GRAIN)
    region.close()


def test_too_little_memory_keeps_what_there_was(stand_in):
    region = Region(stand_in.driver(), 12 * GRAIN)
    region.grow(4 * GRAIN)
    region.memory[: 4 * GRAIN].fill_(5)
    stand_in.limit(10 * GRAIN)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        region.grow(12 * GRAIN)
    assert region.mapped == 4 * GRAIN
    # HIP keeps what it got back until the addresses are given up
    assert stand_in.used == (8 if stand_in.api.prefix == "hip" else 4) * GRAIN
    assert int(region.memory[: 4 * GRAIN].min()) == 5
    region.close()


def test_addresses_that_are_taken_are_not_reserved(stand_in):
    driver = stand_in.driver()
    address = driver.reserve(GRAIN)
    with pytest.raises(VmmError, match="taken meanwhile"):
        driver.reserve(GRAIN, address)
    driver.give_up(address, GRAIN)
    assert driver.reserve(GRAIN, address) == address
    driver.give_up(address, GRAIN)


def test_a_library_without_the_calls(tmp_path):
    with pytest.raises(VmmError, match="too old"):
        Driver(CUDA, 0, ctypes.CDLL(None))
    with pytest.raises(VmmError, match="cannot be opened"):
        Driver(dataclasses.replace(CUDA, library="libnothing-of-that-name.so.1"), 0)


@pytest.mark.parametrize("call", ["Granularity", "Reserve", "Create", "Map", "SetAccess"])
def test_sleep_is_not_offered_where_a_call_fails(stand_in, call):
    made = TorchAllocator(HOST, stand_in.driver)
    stand_in.fail(call)
    made.allow_sleep()
    assert "told to fail" in made.stays_awake("kv")
    memory = made.reserve(100, "kv")  # torch's own then
    assert stand_in.used == 0 and not memory.any()
    assert made.sleep("kv", keep=False) == 0
    tensors = [torch.ones(3)]
    before = tensors[0].data_ptr()
    made.adopt(tensors, "weights")
    assert tensors[0].data_ptr() == before and made.stats() == {"kv": 100}


def test_without_permission_and_without_a_driver():
    made = TorchAllocator(HOST)
    assert "before sleep was allowed" in made.stays_awake("kv")
    made.allow_sleep()
    assert "cannot give memory back" in made.stays_awake("weights")


def test_a_cache_sleeps_and_wakes_as_zeros(allocator, stand_in, module):
    first, second = allocator.reserve(5 * GRAIN, "kv"), allocator.reserve(100, "kv")
    assert not first.any() and not second.any()
    assert allocator.stats() == {"kv": 5 * GRAIN + 100} and stand_in.used == 6 * GRAIN
    first.fill_(1), second.fill_(2)
    where = first.data_ptr(), second.data_ptr()
    module.log.clear()
    assert allocator.sleep("kv", keep=False) == 6 * GRAIN
    assert module.log[0] == "synchronize"  # nobody uses it any more
    assert stand_in.used == 0 and allocator.stats() == {"kv": 5 * GRAIN + 100}
    assert allocator.sleep("kv", keep=False) == 0  # it sleeps already
    allocator.wake("kv")
    assert (first.data_ptr(), second.data_ptr()) == where and not first.any() and not second.any()
    allocator.wake("kv")  # nothing to do
    assert stand_in.used == 6 * GRAIN


def weights() -> list[torch.Tensor]:
    """Views and their base, several dtypes, an empty one, one that was made in inference mode."""
    base = torch.arange(3 * GRAIN, dtype=torch.int32)
    with torch.inference_mode():
        made = torch.randn(70, 11).bfloat16()
    return [
        base[10:90].view(8, 10).t(),
        torch.randn(1000, dtype=torch.float64)[1:],
        base,
        torch.empty(0),
        made,
        torch.tensor(3, dtype=torch.uint8),
    ]


def test_weights_move_in_and_come_back(allocator, stand_in):
    tensors = weights()
    before = [tensor.clone() for tensor in tensors]
    allocator.adopt(tensors, "weights")
    addresses = [tensor.data_ptr() for tensor in tensors]
    region = tensors[0].untyped_storage()
    inside = range(region.data_ptr(), region.data_ptr() + region.nbytes())
    assert all(address in inside for address in addresses if address)
    assert addresses[0] == addresses[2] + 40  # still a view
    assert all(address % 512 == 0 for address in addresses[2:] if address)

    def same() -> bool:
        pairs = zip(tensors, before, strict=True)
        return all(torch.equal(new, old) and new.stride() == old.stride() for new, old in pairs)

    assert same()
    held = stand_in.used
    assert allocator.sleep("weights", keep=True) == held and stand_in.used == 0
    allocator.wake("weights")
    assert (
        same() and [tensor.data_ptr() for tensor in tensors] == addresses and stand_in.used == held
    )


def test_weights_that_were_dropped_are_read_again(allocator, stand_in):
    first = weights()
    allocator.adopt(first, "weights")
    addresses = [tensor.data_ptr() for tensor in first]
    allocator.sleep("weights", keep=False)
    assert stand_in.used == 0
    second = weights()
    second[2].mul_(3)
    expected = [tensor.clone() for tensor in second]
    allocator.adopt(second, "weights")
    assert [tensor.data_ptr() for tensor in second] == addresses
    assert all(torch.equal(a, b) for a, b in zip(second, expected, strict=True))
    assert torch.equal(first[2], second[2])  # the same memory
    with pytest.raises(ValueError, match="not of the same sizes"):
        allocator.adopt([torch.ones(3)], "weights")


def test_a_wake_that_fails_can_be_tried_again(allocator, stand_in):
    tensors, memory = weights(), allocator.reserve(5 * GRAIN, "kv")
    before = tensors[2].clone()
    allocator.adopt(tensors, "weights")
    allocator.sleep("kv", keep=False), allocator.sleep("weights", keep=True)
    stand_in.limit(4 * GRAIN)
    for tag in ("kv", "weights"):
        with pytest.raises(torch.OutOfMemoryError):
            allocator.wake(tag)
        assert stand_in.used == 0
    with pytest.raises(torch.OutOfMemoryError):
        allocator.adopt(weights(), "weights")
    assert stand_in.used == 0
    stand_in.limit(1 << 24)
    allocator.wake("weights"), allocator.wake("kv")
    assert torch.equal(tensors[2], before) and not memory.any()


def test_a_host_without_room_keeps_the_weights_awake(allocator, stand_in, monkeypatch):
    tensors = weights()
    allocator.adopt(tensors, "weights")
    held = stand_in.used
    monkeypatch.setattr(allocators, "host_memory", lambda: 5)
    with pytest.raises(MemoryError, match="the host has 0 MiB free"):
        allocator.sleep("weights", keep=True)
    assert stand_in.used == held and torch.equal(tensors[2], weights()[2])
    monkeypatch.setattr(allocators, "host_memory", lambda: 1 << 40)

    def refused(*_, **__):
        raise RuntimeError("cannot pin")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refused)
        with pytest.raises(MemoryError, match="cannot pin"):
            allocator.sleep("weights", keep=True)
    assert stand_in.used == held and torch.equal(tensors[2], weights()[2])
    assert allocator.sleep("weights", keep=True) == held
    allocator.wake("weights")
    assert torch.equal(tensors[2], weights()[2])


def test_host_memory(tmp_path):
    assert host_memory(tmp_path) > 1 << 60
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   100 kB\n")
    assert host_memory(tmp_path) == 100 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000\n")
    (group / "memory.current").write_text("2000\n")
    assert host_memory(tmp_path) == 3000
    (group / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == 100 << 10
