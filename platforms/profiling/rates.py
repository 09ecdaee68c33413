"""What a device does at most, measured now through PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.platforms.device import DeviceRuntime

REPEATS = 5  # the best is told
ENOUGH = 1e-3  # seconds


def read_rate(runtime: DeviceRuntime) -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    nbytes = min(1 << 30, runtime.memory().free // 4)
    x = torch.ones(max(nbytes >> 14, 1), 4096, device=runtime.device)
    return 4 * x.numel() / min(_best(runtime, x.sum), _best(runtime, lambda: x.sum(1)))


def multiply_rate(runtime: DeviceRuntime, dtype: str) -> float:
    """Operations a second of a product in a dtype: of the largest one that takes little time."""
    kind, device = getattr(torch, dtype), runtime.device
    size, took = 512, 0.0
    while took < ENOUGH and size < 8192:
        size *= 2
        a, b = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
        took = _best(runtime, lambda a=a, b=b: a @ b.t())  # type: ignore[misc]
    return 2 * size**3 / took


def _best(runtime: DeviceRuntime, call: Callable[[], Any]) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            runtime.synchronize()
            began = time.perf_counter()
            call()
            runtime.synchronize()
            times.append(time.perf_counter() - began)
    return min(times)
