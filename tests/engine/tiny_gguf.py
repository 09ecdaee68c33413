"""Small random Llama models as GGUF files, each matrix in blocks of one type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from headrace.engine.weights import dequant
from headrace.engine.weights.dequant import dequantize_array

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 96
SPREAD = 0.05  # of weights
# What is taken from a weight, in scales: the mean of its number, so that weights lie about zero.
OFFSETS = {
    "Q4_1": ("m", -7.5),
    "Q5_1": ("m", -15.5),
    "Q2_K": ("dmin", 1.5),
    "Q4_K": ("dmin", 7.5),
    "Q5_K": ("dmin", 15.5),
}


def random_blocks(name: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """uint8 [rows, bytes a row]: any numbers, under scales that make weights of them."""
    kind, rng = dequant.READABLE[name], np.random.default_rng(seed)
    layout, _ = dequant._FORMATS[name]
    raw = rng.integers(0, 256, rows * kind.row_bytes(cols), dtype=np.uint8)
    fields = raw.view(layout)
    for scale in (1.0, None):
        if scale is None:
            scale = SPREAD / dequantize_array(kind, raw).std()
        fields["d"] = np.float16(scale)
        if name in OFFSETS:
            field, share = OFFSETS[name]
            fields[field] = np.float16(scale * share)
    return raw.reshape(rows, -1)


def write_tiny_gguf(path: Path, name: str) -> None:
    """A model whose matrices are all stored as `name`, "F16" and "BF16" included."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    kind = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(0)

    def matrix(tensor: str, rows: int, cols: int) -> None:
        if name in ("F16", "BF16"):
            values = rng.standard_normal((rows, cols)).astype(np.float32) * SPREAD
            raw = gguf.quants.quantize(values, kind)
        else:
            raw = random_blocks(name, rows, cols, int(rng.integers(1 << 30)))
        writer.add_tensor(f"{tensor}.weight", raw, raw_dtype=kind)

    def norm(tensor: str) -> None:
        values = 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32)
        writer.add_tensor(f"{tensor}.weight", values)

    matrix("token_embd", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        norm(f"{prefix}.attn_norm")
        matrix(f"{prefix}.attn_q", HEADS * HEAD, HIDDEN)
        matrix(f"{prefix}.attn_k", KV_HEADS * HEAD, HIDDEN)
        matrix(f"{prefix}.attn_v", KV_HEADS * HEAD, HIDDEN)
        matrix(f"{prefix}.attn_output", HIDDEN, HEADS * HEAD)
        norm(f"{prefix}.ffn_norm")
        matrix(f"{prefix}.ffn_gate", INTERMEDIATE, HIDDEN)
        matrix(f"{prefix}.ffn_up", INTERMEDIATE, HIDDEN)
        matrix(f"{prefix}.ffn_down", HIDDEN, INTERMEDIATE)
    norm("output_norm")
    matrix("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
