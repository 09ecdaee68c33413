"""What can serve on Intel GPUs: metadata and verdicts. Imports neither torch nor a vendor's library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import Check, Implementation, Requirement, Verdict
from headrace.platforms.torch_device import rows as torch_rows
from headrace.platforms.triton import rows
from headrace.platforms.xpu.hardware import FAMILIES, IPEX, TRITON_NAMES

# Families on which the contract tests were run by the project: none so far.
VERIFIED: frozenset[str] = frozenset()
HOST = "host"

# Intel's extension for PyTorch ended with 2.8 and ends the process when torch's release is another than its own.
EXTENSION = (Requirement(IPEX, ">=2.8,<2.9"), Requirement("torch", "==2.8.*"))
HALVES = ("float16", "bfloat16")
BLOCK_SIZES = (64, 128)
FUSED_EXPERTS = (8, 16)
FUSED_TOP_K = (1, 2, 4, 6, 8)


def implementations(source: str) -> Iterable[Implementation]:
    yield torch_rows.collectives(
        source, "xccl", "headrace.platforms.xpu.collectives:XcclCollectives"
    )
    yield from _extension(source)
    for row in rows.implementations(source, _triton, TRITON_NAMES):
        yield replace(row, supports=_triton_sample) if row.op == "sample" else row
    yield Implementation(
        "sample",
        HOST,
        "headrace.platforms.xpu.sampling:HostSample",
        rank=10,
        supports=_host_sample,
        source=source,
        per_query=True,
    )


def _extension(source: str) -> Iterable[Implementation]:
    """Rows of the extension. Rotary embedding needs several launches more than Triton's kernel, so it ranks below."""
    home = "headrace.platforms.xpu"
    table = (
        ("paged_attention", "ipex_attention:IpexAttention", 60, _attention, False),
        ("linear", "ipex_ops:IpexInt4Linear", 60, _linear, False),
        ("fused_experts", "ipex_ops:IpexExperts", 60, _experts, False),
        ("rms_norm", "ipex_ops:rms_norm", 60, _norm, False),
        ("fused_add_rms_norm", "ipex_ops:fused_add_rms_norm", 60, _norm, False),
        ("rotary_embedding", "ipex_ops:IpexRotary", 40, _rotary, True),
    )
    for op, target, rank, judge, per_query in table:
        yield Implementation(
            op,
            "ipex",
            f"{home}.{target}",
            rank=rank,
            requires=EXTENSION,
            supports=judge,
            source=source,
            per_query=per_query,
        )


def known(check: Check, device: DeviceInfo) -> Check:
    """What is true of all kernels on this device."""
    check.need(device.arch in FAMILIES, f"the kernels do not serve {device.arch}")
    if device.arch not in VERIFIED:
        check.doubt(f"the project has not run it on {device.arch}")
    return check


def _triton(check: Check, device: DeviceInfo) -> Check:
    # a described device has no versions: only what is required is asked of it
    has = not device.versions or "triton" in device.versions
    return known(check.need(has, "the installed Triton has no backend for Intel GPUs"), device)


def _triton_sample(query: Any, device: DeviceInfo) -> Verdict:
    check = _triton(Check(), device)
    check.need(
        "fp64" in device.features, f"{device.arch} has no float64, in which masses are summed"
    )
    return check.verdict()


def _host_sample(query: Any, device: DeviceInfo) -> Verdict:
    """No doubt here: what runs is the reference, and it runs on the host."""
    check = Check().need("fp64" not in device.features, f"{device.arch} can draw tokens itself")
    return check.note(
        f"{device.arch} has no float64: the host draws from a copy of the logits"
    ).verdict()


def _ipex(query: Any, device: DeviceInfo, dtypes: tuple[str, ...] = HALVES) -> Check:
    check = Check()
    # a described device has no versions: only what is required is asked of it
    version = device.versions.get(IPEX, "")
    check.need(not version or "xpu" in version, f"{IPEX} {version} is the build for CPUs")
    check.need(query.dtype in dtypes, f"dtype {query.dtype} not in {dtypes}")
    if query.dtype == "bfloat16":
        check.need("bf16" in device.features, f"{device.arch} has no bfloat16 in its kernels")
    return known(check, device)


def _attention(query: Any, device: DeviceInfo) -> Verdict:
    check = _ipex(query, device)
    # XeTLA's kernels read pages on these alone; on others the same call reads wrong memory
    check.need("block_2d" in device.features, f"{device.arch} has no two-dimensional block loads")
    check.need(query.kv_dtype == query.dtype, f"KV in {query.kv_dtype} beside {query.dtype}")
    size, wide = query.head_dim, query.v_head_dim
    check.need(size == wide, f"keys of {size} beside values of {wide}")
    # others would be padded by a copy of the cache at every call
    check.need(size % 64 == 0, f"heads of {size} are no multiple of 64")
    check.need(size <= 256, f"heads of {size} exceed 256")
    check.need(not query.sinks, "takes no sinks")
    check.need(
        not (query.window and query.softcap), "a window and a soft cap at once: not known to work"
    )
    check.note(f"blocks of {' or '.join(str(n) for n in BLOCK_SIZES)} tokens")
    return check.verdict()


def _norm(query: Any, device: DeviceInfo) -> Verdict:
    return _ipex(query, device, (*HALVES, "float32")).verdict()


def _rotary(query: Any, device: DeviceInfo) -> Verdict:
    check = _ipex(query, device, (*HALVES, "float32"))
    whole = query.rotary_dim == query.head_dim
    check.need(whole, f"{query.rotary_dim} of {query.head_dim} dimensions: whole heads only")
    return check.need(query.is_neox, "pairs of neighbours: halves only").verdict()


def _experts(query: Any, device: DeviceInfo) -> Verdict:
    check = _ipex(query, device)
    check.need({"xmx", "block_2d"} <= device.features, f"{device.arch} has no fused products")
    for scheme in dict.fromkeys((query.scheme or query.dtype, query.down_scheme or query.dtype)):
        check.need(scheme in HALVES, f"weights in {scheme} not in {HALVES}")
    # others are multiplied one after another, with a wait for the device before each
    served = " or ".join(str(n) for n in FUSED_EXPERTS)
    check.need(query.experts in FUSED_EXPERTS, f"{query.experts} experts, not {served}")
    check.need(query.top_k in FUSED_TOP_K, f"{query.top_k} of them, not one of {FUSED_TOP_K}")
    check.need(query.hidden % 8 == 0, f"rows of {query.hidden} are no multiple of 8")
    return check.need(query.activation == "silu", f"activation {query.activation}").verdict()


def _linear(query: Any, device: DeviceInfo) -> Verdict:
    """4-bit weights alone: the plain ones are torch's own, which calls the same library."""
    check = _ipex(query, device)
    scheme = query.scheme or query.dtype
    check.need(
        scheme == "Q4_0", f"weights in {scheme}: only Q4_0 is what the kernels multiply with"
    )
    check.need("xmx" in device.features, f"{device.arch} has no matrix units")
    check.need(query.in_features % 32 == 0, f"{query.in_features} inputs are no multiple of 32")
    check.need(query.out_features % 8 == 0, f"{query.out_features} outputs are no multiple of 8")
    if query.dtype == "bfloat16":
        check.note("scales are rounded to bfloat16")
    return check.verdict()
