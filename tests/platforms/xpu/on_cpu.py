"""The implementations over Intel's extension for PyTorch, with the real package on its own CPU kernels, against the
reference; and the signatures of what is called against those of the made-up package of the quick tests. One line a
check; exit code 1 when one fails.

    python -m tests.platforms.xpu.on_cpu
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from intel_extension_for_pytorch.llm import functional, modules, quantization

from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceInfo
from headrace.platforms.kv_layout import KVFormat
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.queries import (
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
)
from headrace.platforms.reference import implementations
from headrace.platforms.reference.compare import compare
from headrace.platforms.registry import load_target
from headrace.platforms.xpu import ipex_ops
from headrace.platforms.xpu.ipex_attention import BLOCK_SIZES, IpexAttention, Plan
from tests.platforms.xpu import extension


class Host:
    """As much of a runtime as the implementations look at."""

    device = torch.device("cpu")
    info = DeviceInfo("cpu", 0, "the host", "")

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


class OnCpu(IpexAttention):
    """The kernels for CPUs differ in two things: they read blocks as [heads, block size, head size], and they do not
    skip slot -1, which here becomes slot 0 of the dummy block."""

    @classmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        return (KVFormat(("K", "P", "H", "S", "D"), block_sizes=BLOCK_SIZES),)

    @staticmethod
    def pages(cache: torch.Tensor) -> torch.Tensor:
        return cache

    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Plan:
        plan = super().plan(batch, group, static)
        return dataclasses.replace(plan, slots=plan.slots.clamp(min=0))


def _attention(q_heads: int, kv_heads: int, size: int, dtype: str, **options: Any) -> Any:
    return AttentionQuery(q_heads, kv_heads, size, size, dtype, dtype, size**-0.5, **options)


def cases(dtype: str) -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """op, query, implementation; bound as the registry's rows say."""
    yield "rms_norm", NormQuery(4096, dtype), ipex_ops.rms_norm
    yield "fused_add_rms_norm", NormQuery(4096, dtype), ipex_ops.fused_add_rms_norm
    rotary = RotaryQuery(128, 128, dtype)
    yield "rotary_embedding", rotary, ipex_ops.IpexRotary(rotary, HOST)
    for query in (
        _attention(8, 2, 64, dtype),
        _attention(4, 4, 128, dtype),
        _attention(8, 2, 256, dtype),
        _attention(8, 2, 64, dtype, window=20),
        _attention(16, 2, 64, dtype, window=33),
        _attention(8, 2, 64, dtype, softcap=5.0),
    ):
        yield "paged_attention", query, OnCpu(query, HOST)
    for query in (ExpertsQuery(8, 2, 64, 32, dtype), ExpertsQuery(16, 4, 256, 128, dtype)):
        yield "fused_experts", query, ipex_ops.IpexExperts(query, HOST)


HOST: Any = Host()


def numbers(dtype: str) -> Iterator[tuple[str, str]]:
    """A line for each case, and what is wrong with it ("" = nothing)."""
    rows = {row.op: row for row in implementations()}
    for op, query, ours in cases(dtype):
        target = load_target(rows[op].target)
        made = CONTRACTS[op].kind == "class" or rows[op].per_query
        result = compare(
            CONTRACTS[op], query, ours, target(query, HOST) if made else target, HOST.device
        )
        wrong = "" if result.within else f"beyond the tolerance in {result.case}"
        yield f"{op} {query}: largest error {result.largest:.1e}", wrong


def quantized(dtype: str) -> Iterator[tuple[str, str]]:
    """Q4_0 blocks. With many rows the kernels for CPUs multiply in bfloat16, whatever x is: its tolerance holds."""
    rows, width, draw = 128, 256, torch.Generator().manual_seed(1)
    scales = (torch.rand(rows, width // 32, 1, generator=draw) * 0.02 + 0.001).half()
    bytes_ = torch.randint(256, (rows, width // 32, 16), generator=draw, dtype=torch.uint8)
    blocks = torch.cat((scales.view(torch.uint8), bytes_), -1).flatten(1)
    values = torch.cat((bytes_ & 15, bytes_ >> 4), -1).float() - 8
    weight = (values * scales.float()).flatten(1)
    relative, absolute = CONTRACTS["linear"].tolerance["bfloat16"]
    for bias in (None, torch.randn(rows, generator=draw)):
        query = LinearQuery(width, rows, dtype, "Q4_0", bias is not None)
        op = ipex_ops.IpexInt4Linear(query, HOST)
        packed = op.pack(blocks, bias)
        for tokens in (1, 5, 32):
            x = torch.randn(tokens, width, generator=draw).to(getattr(torch, dtype))
            want = torch.nn.functional.linear(x.float(), weight, bias)
            error = (op(x, packed).float() - want).abs()
            wrong = bool((error > absolute + relative * want.abs()).any())
            line = f"linear {query}, {tokens} rows: largest error {float(error.max()):.1e}"
            yield line, "beyond the tolerance" if wrong else ""


def signatures() -> Iterator[tuple[str, str]]:
    """What quick tests call the made-up package with is what the real one takes."""

    def names(function: Any) -> list[str]:
        return [
            name for name in inspect.signature(function).parameters if name not in ("self", "cls")
        ]

    real, made = modules.PagedAttention, extension.PagedAttention
    weights = quantization.IPEXWeightOnlyQuantizedLinear
    pairs = {
        "reshape_and_cache_flash": (real.reshape_and_cache_flash, made.reshape_and_cache_flash),
        "flash_attn_varlen_func": (real.flash_attn_varlen_func, made.flash_attn_varlen_func),
        "GatedMLPMOE": (modules.GatedMLPMOE, extension.GatedMLPMOE),
        "GatedMLPMOE.forward": (modules.GatedMLPMOE.forward, extension.GatedMLPMOE.__call__),
        "rms_norm": (functional.rms_norm, extension.rms_norm),
        "add_rms_norm": (functional.add_rms_norm, extension.add_rms_norm),
        "rotary_embedding": (functional.rotary_embedding, extension.rotary_embedding),
        "from_weight": (weights.from_weight, extension.IPEXWeightOnlyQuantizedLinear.from_weight),
    }
    for name, (theirs, ours) in pairs.items():
        same = names(theirs) == names(ours)
        yield f"signature of {name}", "" if same else f"{names(theirs)}, not {names(ours)}"


def main() -> int:
    torch.set_num_threads(2)
    checks: list[Iterator[tuple[str, str]]] = [signatures()]
    for dtype in ("float32", "bfloat16", "float16"):
        checks += [numbers(dtype), quantized(dtype)]
    count = bad = 0
    for group in checks:
        start = time.monotonic()
        for line, wrong in group:
            count += 1
            bad += bool(wrong)
            took = time.monotonic() - start
            print(f"{line} ({took:.1f} s){'  <- ' if wrong else ''}{wrong}", flush=True)
            start = time.monotonic()
    print(f"{count} checks on the extension's CPU kernels, {bad} failed")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main())
