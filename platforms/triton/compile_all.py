"""Compile every kernel variant that the engine can select, without a device.

    python -m headrace.platforms.triton.compile_all --arch sm_90
    python -m headrace.platforms.triton.compile_all --arch gfx942

Prints registers, spilled bytes and shared memory of each variant; exits with 1 when a variant spills more than
--most-spills bytes, needs more shared memory than the architecture has, or lacks the matrix instructions that its
products should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton
from triton.compiler import ASTSource

from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.triton import (
    activations,
    attention,
    attention_kernels,
    attention_prefill_kernels,
    experts,
    experts_kernels,
    experts_tiled_kernels,
    linear,
    linear_kernels,
    logprobs,
    mla,
    mla_kernels,
    norms,
    penalties,
    rotary,
    routing,
    sampling,
)
from headrace.platforms.triton.rows import HOLD_LATENTS
from headrace.platforms.triton.targets import ARCHS, Resources, Target
from headrace.platforms.triton.targets import target as make_target

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# q heads, kv heads, head size, options: the common models, and the edges
ATTENTION: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (32, 8, 128, {}),  # Llama 3.1 8B
    (32, 8, 64, {}),  # Llama 3.2 1B
    (9, 3, 64, {}),  # SmolLM2
    (32, 8, 128, {"window": 4096}),  # Mistral
    (32, 32, 80, {}),
    (4, 1, 256, {"window": 512}),  # Gemma 3
    (8, 4, 256, {"softcap": 50.0}),  # Gemma 2
    (64, 8, 64, {"window": 128, "sinks": True}),
)
# query heads over a row of 512 + 64 numbers: DeepSeek-V2-Lite, and V3 on one device
LATENT = (16, 128)
LINEAR = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256), (576, 960))
# experts, of them for a token, hidden, intermediate: Mixtral 8x7B, Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B
EXPERTS = ((8, 2, 4096, 14336), (60, 4, 2048, 1408), (128, 8, 2048, 768))
# How experts over copied tiles are compiled where a device keeps to the other kernels.
TILED: Mapping[int, Mapping[str, Any]] = {
    rows: {
        **experts.UNTILED,
        "TILED": True,
        "SWAP": rows < 64,
        "FLAT": True,
        "E": EXPERTS[-1][0],
        "BLOCK_N": 64 if rows < 64 else 128,
        "BLOCK_K": 64,
        "num_stages": 4,
        "num_warps": 4 if rows < 128 else 8,
    }
    for rows in experts.TILE_ROWS
}
# DeepSeek-V2-Lite's, V2's and V3's
ROUTERS = (
    RouterQuery(64, 6, scale=1.5),
    RouterQuery(160, 6, groups=8, top_groups=3, scale=16.0),
    RouterQuery(256, 8, True, "sigmoid", groups=8, top_groups=4, bias=True, scale=2.5),
)
# integers that kernels are not specialized on
NOT_SPECIALIZED = ("table_stride", "splits", "count", "P", "block_m", "top", "M")


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    kernel: Any
    pointers: Mapping[str, str]  # argument -> element type
    scalars: Mapping[str, str]
    options: Mapping[str, Any]  # constants, num_warps, num_stages


def variants(runtime: Any) -> Iterator[Variant]:
    """Of all kernels, with the launch options that `runtime` (a DeviceRuntime, or targets.py's `Described`)
    wants."""
    for dtype, short in DTYPES.items():
        yield from _attention(dtype, short, runtime)
        yield from _rows(dtype, short, runtime)
        yield from _linear(dtype, short, runtime)
        yield from _experts(dtype, short, runtime)
    yield from _routing(runtime)
    yield from _sampling(runtime)
    yield from _logits(runtime)


def _sampling(runtime: Any) -> Iterator[Variant]:
    """Alike for all dtypes: logits are float32."""
    names = ("logits", "temperatures", "top_ps", "min_ps", "uniforms", "totals", "edges", "values")
    pointers = {**dict.fromkeys(names, "fp32"), "best": "i64", "sums": "i64"}
    pointers |= dict.fromkeys(("top_ks", "finite", "counts", "tokens"), "i32")
    scalars = dict.fromkeys(("stride", "V", "tiles"), "i32")
    for vocab in (32000, 128256, 262144):
        query = SampleQuery(vocab, 256)
        for name, (kernel, _) in sampling.KERNELS.items():
            for guard in (False, True) if name == "draw" else (True,):
                options = {**sampling.options(name, query, runtime), "GUARD": guard}
                kinds = {**pointers, "ids": "i32" if guard else "i64"}
                label = f"sample {name} of {vocab}{', guarded' if guard else ''}"
                yield Variant(label, kernel, kinds, scalars, options)


def _logits(runtime: Any) -> Iterator[Variant]:
    """What else is done to them: log-probabilities, penalties, masks."""
    integers = ("sequences", "where", "ids", "rank", "top_ids", "best")
    numbers = ("logits", "factors", "peaks", "sums", "own", "totals", "top_logprobs")
    pointers = {**dict.fromkeys(integers, "i64"), **dict.fromkeys(numbers, "fp32")}
    pointers |= dict.fromkeys(("tokens", "table", "allowed", "larger"), "i32")
    names = ("V", "stride", "stride_logits", "words", "tiles", "top")
    scalars = dict.fromkeys(names, "i32")
    for vocab in (32000, 262144):
        query = SampleQuery(vocab, 256)
        tile, row = logprobs.options(query, runtime)
        for kernel, options in (
            (penalties.count_kernel, penalties.options(query, runtime)),
            (penalties.penalties_kernel, penalties.options(query, runtime)),
            (penalties.bitmask_kernel, penalties.bitmask_options(query, runtime)),
            (logprobs.tile_kernel, tile),
            (logprobs.row_kernel, row),
        ):
            yield Variant(f"{kernel.__name__} of {vocab}", kernel, pointers, scalars, options)


def _attention(dtype: str, short: str, runtime: Any) -> Iterator[Variant]:
    yield from _paged(dtype, short, dtype, short, runtime)
    yield from _latent(dtype, short, dtype, short, runtime)
    features = runtime.info.features
    if "fp8" in features and "fp8_fnuz" not in features:
        yield from _paged(dtype, short, "fp8_e4m3", "fp8e4nv", runtime)
        yield from _latent(dtype, short, "fp8_e4m3", "fp8e4nv", runtime)


def _paged(dtype: str, short: str, kv_dtype: str, kv: str, runtime: Any) -> Iterator[Variant]:
    names = "o_token o_head q_token q_head k_block k_run k_slot v_block v_run v_slot table_stride splits count"
    names += " block_stride run_stride slot_stride"
    scalars = {**dict.fromkeys(names.split(), "i32"), "scale": "fp32"}
    caches = {"out": short, "q": short, "k_cache": kv, "v_cache": kv}
    integers = dict.fromkeys(("starts", "tiles", "seq_lens", "table", "done"), "i32")
    pointers = {**caches, **integers, "sinks": "fp32", "partial": "fp32", "lse": "fp32"}
    # 8-bit caches change what is loaded and stored, not the rest: some shapes are enough
    for q_heads, kv_heads, size, options in ATTENTION if kv == short else ATTENTION[:6:5]:
        query = AttentionQuery(
            q_heads, kv_heads, size, size, dtype, kv_dtype, size**-0.5, **options
        )
        label = f"{short} {q_heads}/{kv_heads}x{size} {options or ''}".strip()
        label += f" KV {kv}" if kv != short else ""
        common = (pointers, scalars)
        chosen = {**attention.prefill_options(query, runtime), "SIZE": 32}
        kernel = attention_prefill_kernels.prefill_kernel
        yield Variant(f"prefill {label}", kernel, *common, chosen)
        for name, many in (("decode", False), ("decode many", True)):
            options = attention.decode_options(query, runtime, many) | {"SIZE": 32, "BESIDE": False}
            yield Variant(f"{name} {label}", attention_kernels.decode_kernel, *common, options)
        if chosen["PDL"] and dtype == "bfloat16":  # all are alike
            yield from _beside(label, query, *common, runtime)
        chosen = attention.combine_options(query, runtime)
        yield Variant(f"combine {label}", attention_kernels.combine_kernel, *common, chosen)
        chosen = {**attention.write_options(query, runtime), "SIZE": 32}
        inputs = {"k": short, "v": short, "k_cache": kv, "v_cache": kv, "slots": "i64"}
        names = "k_token k_head v_token v_head k_block k_run k_slot v_block v_run v_slot"
        integers = dict.fromkeys(names.split(), "i32")
        kernel = attention_kernels.write_kernel
        yield Variant(f"write {label}", kernel, inputs, integers, chosen)
        inputs |= {"q": short, "positions": "i64"}
        inputs |= dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "fp32")
        numbers = {**integers, **dict.fromkeys(("q_token", "q_head"), "i32"), "eps": "fp32"}
        kernel = attention_kernels.turn_write_kernel
        for norm in (False, True):
            chosen = {**attention.turn_options(query, runtime), "SIZE": 32, "NORM": norm}
            text = f"turn and write {label}{' norms' if norm else ''}"
            yield Variant(text, kernel, inputs, numbers, chosen)
        yield from _turned_decodes(
            label, query, {**pointers, **inputs}, {**scalars, **numbers}, runtime
        )


def _beside(
    label: str,
    query: AttentionQuery,
    pointers: Mapping[str, str],
    scalars: Mapping[str, str],
    runtime: Any,
) -> Iterator[Variant]:
    """Prompts and decodes that run side by side."""
    options = attention.prefill_options(query, runtime, beside=True) | {"SIZE": 32}
    kernel = attention_prefill_kernels.prefill_kernel
    yield Variant(f"prefill beside decodes {label}", kernel, pointers, scalars, options)
    options = attention.decode_options(query, runtime, beside=True) | {"SIZE": 32, "BESIDE": True}
    kernel = attention_kernels.decode_kernel
    yield Variant(f"decode beside prompts {label}", kernel, pointers, scalars, options)


def _latent(dtype: str, short: str, kv_dtype: str, kv: str, runtime: Any) -> Iterator[Variant]:
    names = "o_token o_head q_token q_head k_token k_block k_slot table_stride splits"
    scalars = {**dict.fromkeys(names.split(), "i32"), "scale": "fp32"}
    pointers = {"out": short, "q": short, "k": short, "k_cache": kv, "slots": "i64"}
    pointers |= dict.fromkeys(("starts", "tiles", "seq_lens", "table", "done"), "i32")
    pointers |= {"partial": "fp32", "lse": "fp32"}
    asked = LATENT if kv == short else LATENT[:1]
    for heads in asked if runtime.info.features & HOLD_LATENTS else ():
        query = AttentionQuery(heads, 1, 576, 512, dtype, kv_dtype, 576**-0.5, latent=True)
        for name, made in (
            ("prefill", mla.prefill_options),
            ("decode", mla.decode_options),
            ("write", mla.write_options),
        ):
            kernel = getattr(mla_kernels, f"latent_{name}_kernel")
            label = f"latent {name} {short} {heads}" + (f" KV {kv}" if kv != short else "")
            options = {**made(query, runtime), "SIZE": 32}
            yield Variant(label, kernel, pointers, scalars, options)


def _turned_decodes(
    label: str,
    query: AttentionQuery,
    pointers: Mapping[str, str],
    scalars: Mapping[str, str],
    runtime: Any,
) -> Iterator[Variant]:
    for many, norm in product((False, True), repeat=2):
        options = attention.decode_options(query, runtime, many)
        if not attention.turns_decodes(query, options):
            return
        chosen = {**options, "SIZE": 32, "NORM": norm}
        text = f"turn and decode{' many' if many else ''} {label}{' norms' if norm else ''}"
        yield Variant(text, attention_kernels.turn_decode_kernel, pointers, scalars, chosen)


def _rows(dtype: str, short: str, runtime: Any) -> Iterator[Variant]:
    for width in (128, 576, 2048, 4096, 8192):
        pointers = {"x": short, "residual": short, "weight": "fp32", "out": short}
        names = ("heads", "stride_token", "stride_head", "stride_x", "stride_residual")
        scalars = {**dict.fromkeys(names, "i32"), "eps": "fp32"}
        options = norms.options(NormQuery(width, dtype), runtime)
        for name in ("rms_norm_kernel", "add_rms_norm_kernel"):
            kernel = getattr(norms, name)
            yield Variant(f"{name} {short} {width}", kernel, pointers, scalars, options)
    for size, part in ((128, 128), (64, 64), (256, 256), (128, 64)):
        for neox in (True, False):
            turn = rotary.Rotary(RotaryQuery(size, part, dtype, neox), runtime)
            pointers = {"positions": "i64", "q": short, "k": short, "cos_sin": "fp32"}
            scalars = dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32")
            options = {**turn.options, "Q_HEADS": 32, "K_HEADS": 8, "NEOX": neox, "HEADS": 8}
            label = f"rotary {short} {part} of {size} {'halves' if neox else 'pairs'}"
            yield Variant(label, rotary.rotary_kernel, pointers, scalars, options)
    for kind in (activations.SiluAndMul, activations.GeluAndMul, activations.GeluTanhAndMul):
        options = {**kind(ActivationQuery(14336, dtype), runtime).options, "WIDTH": 14336}
        pointers = {"x": short, "out": short}
        kernel = activations.gated_kernel
        yield Variant(f"{kind.kind} {short}", kernel, pointers, {"stride": "i32"}, options)


def _linear(dtype: str, short: str, runtime: Any) -> Iterator[Variant]:
    names = ("x", "w", "bias", "y", "residual", "total", "normed")
    pointers = {**dict.fromkeys(names, short), "norm": "fp32"}
    scalars = {**dict.fromkeys(("K", "stride_w"), "i32"), "eps": "fp32"}
    for width, out in LINEAR:
        query = LinearQuery(width, out, dtype)
        for norm in (False, True):
            label = f"{short} {out}x{width}{' normed' if norm else ''}"
            options = linear.row_options(query, runtime) | {"NORM": norm, "KEEP": norm}
            if options["WHOLE"] or not norm:
                kernel = linear_kernels.row_kernel
                yield Variant(f"row {label}", kernel, pointers, scalars, options)
            options = linear.gated_row_options(query, runtime) | {"NORM": norm, "KIND": "silu"}
            if options["WHOLE"] or not norm:
                kernel = linear_kernels.gated_row_kernel
                yield Variant(f"gated row {label}", kernel, pointers, scalars, options)
        yield from _few_rows(query, f"{short} {out}x{width}", runtime)


def _few_rows(query: LinearQuery, label: str, runtime: Any) -> Iterator[Variant]:
    """Where nothing was measured the library does these products: then as a device would begin to tune them."""
    if query.dtype == "float32" or (query.in_features, query.out_features) != LINEAR[0]:
        return  # all are alike but for N
    pointers = dict.fromkeys(("x", "w", "bias", "y"), DTYPES[query.dtype])
    pointers |= {"partial": "fp32", "done": "i32"}
    scalars = dict.fromkeys(("M", "stride_x", "stride_y", "K", "stride_w"), "i32")
    for rows in linear.FEW_ROWS:
        options = linear.few_options(query, runtime, rows)
        for splits in (1, 4):
            chosen = {**options, "SPLITS": splits, "KIND": ""}
            chosen["BLOCK_N"] = options["BLOCK_N"] or 64
            text = f"few rows {label} {rows} rows, {splits} parts"
            yield Variant(text, linear_kernels.few_rows_kernel, pointers, scalars, chosen)


def _experts(dtype: str, short: str, runtime: Any) -> Iterator[Variant]:
    pointers = dict.fromkeys(("x", "w13", "w2", "h", "y", "out"), short)
    pointers |= {**dict.fromkeys(("ids", "order", "tiles"), "i32"), "weights": "fp32"}
    scalars = dict.fromkeys(("P", "stride_x", "H", "INTER"), "i32")
    for count, top_k, hidden, size in EXPERTS:
        query = ExpertsQuery(count, top_k, hidden, size, dtype)
        label = f"{short} {count}/{top_k} {hidden}x{size}"
        for name in ("gate_up_row", "down_row"):
            kernel = getattr(experts_kernels, f"{name}_kernel")
            options = experts.row_options(name, query, runtime)
            yield Variant(f"experts {name} {label}", kernel, pointers, scalars, options)
        for rows, name in product(experts.tile_sizes(query), ("gate_up", "down")):
            kernel = getattr(experts_kernels, f"{name}_kernel")
            for few in (True, False) if rows == 16 else (False,):
                options = experts.product_options(name, query, runtime, rows, few)
                text = f"experts {name} {label} {rows} rows{', few' if few else ''}"
                if not options.get("TILED"):
                    yield Variant(text, kernel, pointers, scalars, options)
            if options.get("TILED") is not None and dtype != "float32":
                if not options["TILED"]:
                    if dtype != "bfloat16" or count != EXPERTS[-1][0]:
                        continue  # all are alike but for sizes
                    options = {**options, **TILED[rows]}
                yield _tiled(name, f"{text}, tiled", {**pointers, "w": short}, scalars, options)
        options = experts.sum_options(query, runtime)
        yield Variant(
            f"experts sum {label}", experts_kernels.sum_kernel, pointers, scalars, options
        )


def _tiled(
    name: str,
    label: str,
    pointers: Mapping[str, str],
    scalars: Mapping[str, str],
    options: Mapping[str, Any],
) -> Variant:
    """One of the experts' products over copied tiles."""
    rows, columns, depth = (options[f"BLOCK_{which}"] for which in "MNK")
    both = name == "gate_up" and not options["SWAP"]
    weights = f"1, 2, {columns}, {depth}" if both else f"1, {columns}, {depth}"
    blocks = {"w13": weights} if name == "gate_up" else {"w2": weights, "h": f"{rows}, {depth}"}
    described = {of: f"tensordesc<{pointers['w']}[{block}]>" for of, block in blocks.items()}
    kernel = getattr(experts_tiled_kernels, f"tiled_{name}_kernel")
    return Variant(label, kernel, {**pointers, **described}, scalars, options)


def _routing(runtime: Any) -> Iterator[Variant]:
    """The router and the sort: alike for all dtypes."""
    pointers = {"logits": "fp32", "weights": "fp32"}
    pointers |= dict.fromkeys(("ids", "counts", "order", "tiles"), "i32")
    scalars = dict.fromkeys(("stride", "P", "most_tiles", "block_m"), "i32")
    for router in ROUTERS:
        options = routing.options(router, runtime)
        label = f"route {router.experts}/{router.top_k} {router.scoring}"
        numbers = {**pointers, "bias": "fp32"}
        yield Variant(label, routing.route_kernel, numbers, scalars, options)
    for count, top_k, hidden, size in EXPERTS:
        options = routing.options(RouterQuery(count, top_k, True), runtime)
        kernel = routing.topk_softmax_kernel
        yield Variant(f"topk_softmax {count}/{top_k}", kernel, pointers, scalars, options)
        query = ExpertsQuery(count, top_k, hidden, size, "bfloat16")
        for block in (*experts.SORTED_AT_ONCE, 0):
            options = experts.sort_options(query, runtime, block)
            label = f"experts sort {count}{f', {block} at once' if block else ''}"
            yield Variant(label, experts_kernels.sort_kernel, pointers, scalars, options)
        kernel = experts_kernels.count_kernel
        yield Variant(f"experts count {count}", kernel, pointers, scalars, options)


def compile_variant(variant: Variant, target: Target) -> Resources:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if variant.pointers.get(name, "").startswith("tensordesc"):
            signature[name] = variant.pointers[name]
            continue
        if name in variant.pointers:
            signature[name] = f"*{variant.pointers[name]}"
        elif name in variant.scalars:
            signature[name] = variant.scalars[name]
        else:
            signature[name] = "constexpr"
            constants[name] = variant.options[name]
            continue
        if signature[name] != "fp32" and name not in NOT_SPECIALIZED:
            attributes[(index,)] = target.facts(name, signature[name])
    source = ASTSource(variant.kernel, signature, constants, attributes)
    # what is no argument of the kernel is for the compiler
    names = variant.options.keys() - set(variant.kernel.arg_names)
    options = {name: variant.options[name] for name in sorted(names)}
    return target.resources(triton.compile(source, target=target.compiler, options=options))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90", choices=ARCHS)
    parser.add_argument("--most-spills", type=int, help="bytes a variant may spill")
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument("--quiet", action="store_true", help="print what is beyond the bounds")
    asked = parser.parse_args()
    bad = count = most = 0
    target = make_target(asked.arch)
    most_spills = target.most_spills if asked.most_spills is None else asked.most_spills
    for variant in variants(target.runtime):
        if asked.only not in variant.name:
            continue
        count += 1
        try:
            used = compile_variant(variant, target)
        except Exception as error:  # one that does not compile is a finding, and so are the others
            bad += 1
            print(
                f"{variant.name:50} FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}"
            )
            continue
        over = used.spills > most_spills or used.shared > target.shared
        bad += over or bool(used.missing)
        most = max(most, used.spills)
        text = f"{used.registers:4} registers {used.spills:5} spilled {used.shared:7} shared"
        text += "  <- too much" if over else ""
        text += f"  <- no {used.missing}" if used.missing else ""
        if over or used.missing or not asked.quiet:
            print(f"{variant.name:50} {text}", flush=True)
    print(
        f"{asked.arch}: {count} variants, {bad} beyond the bounds; at most {most} bytes spilled "
        f"(bound {most_spills})",
        flush=True,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
