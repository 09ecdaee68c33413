"""Runtimes on chosen builds of the native kernel library, and random blocks of every GGUF type it computes on."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import torch

from headrace.platforms.cpu.builds import BUILDS, FEATURE, HERE, fitting
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.device import DeviceRuntime

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Where a block's fp16 numbers lie, in bytes.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def runnable() -> list[str]:
    """Builds that are here and that this CPU can run, strongest first."""
    features = CpuPlatform.probe()[0].features
    return [name for name in fitting(features) if list(HERE.glob(f"_native_{name}.*so"))]


def open_build(name: str) -> DeviceRuntime:
    """This machine as if its CPU had just what the build needs."""
    device = CpuPlatform.probe()[0]
    device = dataclasses.replace(device, features=BUILDS[name] | {FEATURE})
    threads = torch.get_num_threads()
    runtime = CpuPlatform().open(device)
    torch.set_num_threads(threads)
    return runtime


def blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random stored rows, uint8 [rows, bytes a row]: every bit of the integers and of the packed scales is drawn."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows * width // block, size), np.uint8)
    for at in _HALVES[kind]:
        halves = (rng.uniform(0.3, 1.0, len(raw)) * rng.choice([-0.02, 0.02], len(raw))).astype(
            "<f2"
        )
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def values(kind: str, raw: np.ndarray) -> torch.Tensor:
    """What the gguf package says the blocks hold, float32 [rows, width]."""
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
