"""Generated inputs of every op contract: for contract tests and for the start-up self-test.

Each generator gives fresh inputs at every run, so an implementation may write into what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from headrace.platforms.attention import PagedAttention, Turn
from headrace.platforms.batch import BatchView
from headrace.platforms.kv_layout import SCALE_BYTES
from headrace.platforms.linear import Norm
from headrace.platforms.ops import Case
from headrace.platforms.queries import (
    ActivationQuery,
    AttentionQuery,
    EmbeddingQuery,
    ExpertsQuery,
    LinearQuery,
    NormQuery,
    RotaryQuery,
    RouterQuery,
    SampleQuery,
)
from headrace.platforms.reference import ops
from headrace.platforms.reference.int8_rows import dequantize

Tensors = tuple[torch.Tensor, ...]
TOKENS = (1, 5, 32)


class _Draw:
    """Random tensors that are equal on every device: drawn on the host, then copied."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self.device, getattr(torch, dtype))

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator).to(self.device)


def _case(
    name: str, body: Callable[[Any, _Draw], Tensors], device: torch.device, seed: int
) -> Case:
    return Case(name, lambda op: body(op, _Draw(device, seed)))


def linear(query: LinearQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, tokens: int) -> Tensors:
        size = query.in_features
        if query.scheme == "Q4_0":
            weight, rows = _q4_0(draw, query)
            weight = rows if op.query.scheme else weight
        else:
            weight = draw.normal(query.out_features, size, dtype=query.dtype, scale=size**-0.5)
        bias = draw.normal(query.out_features, dtype=query.dtype) if query.bias else None
        x = draw.normal(tokens, size, dtype=query.dtype)
        packed = op.pack(weight, bias)
        y = op(x, packed)
        if query.out_features % 2:
            return (y,)
        fused = tokens <= op.gated_rows
        gated = op.gated(x, packed, "silu") if fused else ops.silu_and_mul(y)
        residual = draw.normal(tokens, size, dtype=query.dtype)
        norm = Norm(draw.normal(size), 1e-5)
        if tokens <= op.normed_rows:
            gated_normed = op.normed(x, residual, norm, packed, "silu")[0]
            return y, gated, gated_normed, *op.normed(x, residual, norm, packed, keep=True)
        normed, total = ops.fused_add_rms_norm(x, residual, norm.weight, norm.eps)
        y_normed = op(normed, packed)
        return y, gated, ops.silu_and_mul(y_normed), y_normed, total, normed

    return [
        _case(f"T={n}", lambda op, draw, n=n: body(op, draw, n), device, seed)  # type: ignore[misc]
        for n in TOKENS
    ]


def _q4_0(draw: _Draw, query: LinearQuery) -> Tensors:
    """Weights that the scheme holds exactly, as they are and as GGUF stores them: for each 32 numbers a float16 scale,
    then bytes with the first 16 numbers in the low halves and the others in the high ones, 8 added to each."""
    rows, size = query.out_features, query.in_features
    numbers = draw.integers(16, rows, size // 32, 32).cpu()
    scale = 2.0 ** -round(np.log2(4 * size**0.5))
    scales = torch.full((rows, size // 32, 1), scale, dtype=torch.float16)
    halves = (numbers[..., :16] | numbers[..., 16:] << 4).to(torch.uint8)
    stored = torch.cat((scales.view(torch.uint8), halves), -1).flatten(1)
    plain = ((numbers - 8) * scale).flatten(1).to(draw.device, getattr(torch, query.dtype))
    return plain, stored


def embedding(query: EmbeddingQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, dtype: torch.dtype) -> Tensors:
        packed = op.pack(draw.normal(query.vocab, query.hidden, dtype=query.dtype))
        return (op(draw.integers(query.vocab, 7).to(dtype), packed),)

    return [
        _case(f"ids {t}", lambda op, draw, t=t: body(op, draw, t), device, seed)  # type: ignore[misc]
        for t in (torch.int32, torch.int64)
    ]


def topk_softmax(query: RouterQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, tokens: int, scale: float, step: float) -> Tensors:
        logits = draw.normal(tokens, query.experts, scale=scale)
        if step:  # many equal logits
            logits = (logits / step).round() * step
        bias = (draw.normal(query.experts, scale=0.2),) if query.bias else ()
        weights, ids = op(logits, query.top_k, query.renormalize, *bias)
        return weights, ids

    return [
        _case(
            f"T={n}, logits x{s} in steps of {step}",
            lambda op, draw, n=n, s=s, step=step: body(op, draw, n, s, step),  # type: ignore[misc]
            device,
            seed,
        )
        for n in (1, 5, 64)
        for s, step in ((1.0, 0.0), (30.0, 0.0), (1.0, 0.5), (0.0, 0.0))
    ]


def fused_experts(query: ExpertsQuery, device: torch.device, seed: int) -> list[Case]:
    """Tokens spread over all experts, over as few as can be (the others unused), and all on the same ones."""
    experts, top_k = query.experts, query.top_k

    def chosen(draw: _Draw, tokens: int, spread: str) -> torch.Tensor:
        scores = draw.uniform(tokens, experts)
        if spread == "few":
            scores[:, top_k + 1 :] = 0
        elif spread == "one":
            scores = scores[:1].expand(tokens, experts)
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].int()

    def body(op: Any, draw: _Draw, tokens: int, spread: str) -> Tensors:
        hidden, size = query.hidden, query.intermediate
        w13 = draw.normal(experts, 2 * size, hidden, dtype=query.dtype, scale=hidden**-0.5)
        w2 = draw.normal(experts, hidden, size, dtype=query.dtype, scale=size**-0.5)
        x = draw.normal(tokens, hidden, dtype=query.dtype)
        weights = draw.uniform(tokens, top_k)
        return (op(x, weights, chosen(draw, tokens, spread), op.pack(w13, w2)),)

    return [
        _case(
            f"T={n}, {spread} experts",
            lambda op, draw, n=n, spread=spread: body(op, draw, n, spread),  # type: ignore[misc]
            device,
            seed,
        )
        for n in (0, 1, 2, 5, 64)
        for spread in ("all", "few", "one")
    ]


def rms_norm(query: NormQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, shape: tuple[int, ...], weight_dtype: str) -> Tensors:
        x = draw.normal(*shape, query.hidden, dtype=query.dtype, scale=3.0)
        weight = draw.normal(query.hidden, dtype=weight_dtype)
        return op(x, weight, 1e-6), x

    shapes: list[tuple[int, ...]] = [(1,), (17,), (5, 3)]
    return [
        _case(f"{s} {w}", lambda op, draw, s=s, w=w: body(op, draw, s, w), device, seed)  # type: ignore[misc]
        for s in shapes
        for w in dict.fromkeys(("float32", query.dtype))
    ]


def fused_add_rms_norm(query: NormQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, tokens: int) -> Tensors:
        x = draw.normal(tokens, query.hidden, dtype=query.dtype)
        residual = draw.normal(tokens, query.hidden, dtype=query.dtype, scale=4.0)
        normed, total = op(x, residual, draw.normal(query.hidden), 1e-5)
        return normed, total

    return [
        _case(f"T={n}", lambda op, draw, n=n: body(op, draw, n), device, seed)  # type: ignore[misc]
        for n in TOKENS
    ]


def rotary_embedding(query: RotaryQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, tokens: int) -> Tensors:
        heads, kv_heads, length = 6, 2, 64
        angles = draw.normal(length, query.rotary_dim // 2, scale=3.0)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        # one buffer, as a fused projection gives it: q and k are strided views
        qkv = draw.normal(tokens, heads + 2 * kv_heads, query.head_dim, dtype=query.dtype)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        op(draw.integers(length, tokens), q, k, cos_sin, query.is_neox)
        return (qkv,)

    return [
        _case(f"T={n}", lambda op, draw, n=n: body(op, draw, n), device, seed)  # type: ignore[misc]
        for n in TOKENS
    ]


def gated_activation(query: ActivationQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, tokens: int) -> Tensors:
        return (op(draw.normal(tokens, 2 * query.intermediate, dtype=query.dtype, scale=2.0)),)

    return [
        _case(f"T={n}", lambda op, draw, n=n: body(op, draw, n), device, seed)  # type: ignore[misc]
        for n in TOKENS
    ]


def sample(query: SampleQuery, device: torch.device, seed: int) -> list[Case]:
    rows = max(1, min(query.max_reqs, 8))
    vocab = query.vocab

    def body(
        op: Any, draw: _Draw, scale: float, options: tuple[float, int, float, float]
    ) -> Tensors:
        temperature, top_k, top_p, min_p = options
        logits = draw.normal(rows, vocab, scale=scale)
        logits[:, vocab // 2] = logits[:, vocab // 3]  # equal logits
        temperatures = torch.full((rows,), temperature, device=device)
        temperatures[rows // 2 + 1 :: 2] = 0.0  # a mixture with greedy rows
        return (
            op(
                logits,
                temperatures,
                torch.full((rows,), top_k, dtype=torch.int32, device=device),
                torch.full((rows,), top_p, device=device),
                torch.full((rows,), min_p, device=device),
                draw.uniform(rows),
            ),
        )

    cases = []
    for scale in (0.0, 0.5, 6.0):  # all equal, flat, peaked
        for options in (
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 20, 0.9, 0.0),
            (1.3, 0, 0.95, 0.0),
            (1.0, 2**31 - 1, 1.0, 0.1),
            (2.0, 1, 1e-9, 1.0),
        ):
            name = f"logits x{scale}, temperature/top_k/top_p/min_p {options}"
            cases.append(
                _case(name, lambda op, draw, s=scale, o=options: body(op, draw, s, o), device, seed)  # type: ignore[misc]
            )
    return cases


# -- paged attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch as pairs (context length including this step, new tokens); decode requests first."""

    lengths: tuple[tuple[int, int], ...]
    padding: int = 0  # padding requests of one token each


def scattered_blocks(requests: Requests, block_size: int, seed: int) -> np.ndarray:
    """Block table [B, P] int32 of shuffled distinct blocks from 1 on; unused entries are the dummy block 0."""
    needed = [-(-total // block_size) for total, _ in requests.lengths]
    shuffled = np.random.default_rng(seed).permutation(
        np.arange(1, 1 + sum(needed), dtype=np.int32)
    )
    table = np.zeros((len(needed) + requests.padding, max(needed)), np.int32)
    for i, end in enumerate(np.cumsum(needed)):
        table[i, : needed[i]] = shuffled[end - needed[i] : end]
    return table


def make_batch(
    requests: Requests, table: np.ndarray, block_size: int, device: torch.device
) -> BatchView:
    """The BatchView of one step with one KV group."""
    pad = requests.padding
    lengths = np.array([total for total, _ in requests.lengths] + [1] * pad, np.int32)
    new = np.array([n for _, n in requests.lengths] + [1] * pad, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    slots = np.full(int(new.sum()), -1, np.int64)
    for i in range(len(requests.lengths)):
        at = np.arange(lengths[i] - new[i], lengths[i])
        slots[starts[i] : starts[i + 1]] = table[i, at // block_size].astype(
            np.int64
        ) * block_size + (at % block_size)
    return BatchView(
        num_reqs=len(requests.lengths),
        num_tokens=len(slots) - pad,
        num_decode_reqs=len(list(takewhile(lambda pair: pair[1] == 1, requests.lengths))),
        max_query_len=int(new.max()),
        max_seq_len=int(lengths.max()),
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device),
        block_tables=[torch.from_numpy(table).to(device)],
        slot_mappings=[torch.from_numpy(slots).to(device)],
        query_start_loc_host=starts,
        seq_lens_host=lengths,
        block_tables_host=[table],
        block_size=block_size,
    )


def make_caches(
    op: PagedAttention, block_size: int, blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V views [P, Hkv, S, D] over memory in the first layout that takes the block size, all NaN.

    NaN is what a failed request may leave in a block: it must not reach the block's next owner.
    """
    query = op.query
    fmt = next(f for f in type(op).kv_formats(query) if f.accepts(block_size))
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn"}.get(query.kv_dtype, query.kv_dtype))
    scale = SCALE_BYTES.get(query.kv_dtype, 0) // dtype.itemsize
    widths = query.head_dim + scale, query.v_head_dim + scale
    sizes = {"P": blocks, "K": 2, "H": query.kv_heads, "S": block_size, "D": max(widths)}
    if query.latent:
        sizes["K"] = 1
    spoilt = torch.nan if dtype.is_floating_point else -1  # a scale of four bytes -1 is NaN
    memory = torch.full([sizes[axis] for axis in fmt.layout], spoilt, dtype=dtype, device=device)
    logical = memory.permute([fmt.layout.index(axis) for axis in ("P", "K", "H", "S", "D")])
    values = sizes["K"] - 1  # in the keys' own memory if latent
    return logical[:, 0, ..., : widths[0]], logical[:, values, ..., : widths[1]]


def block_sizes(op: PagedAttention) -> list[int]:
    """A small, the preferred and a large block size that the implementation reads."""
    formats = type(op).kv_formats(op.query)
    exact = [size for fmt in formats for size in fmt.block_sizes]
    wanted = (16, formats[0].preferred_block_size, 128, *exact)
    return [n for n in dict.fromkeys(wanted) if any(fmt.accepts(n) for fmt in formats)][:3]


def run_attention(
    op: PagedAttention, draw: _Draw, requests: Requests, size: int, turned: bool | None = None
) -> Tensors:
    """Write the history of every request, then this step's keys and values, attend; also what was written.

    `turned`: whether this step's queries and keys are normed before they are turned; None: they are neither.
    """
    query, device = op.query, draw.device
    table = scattered_blocks(requests, size, draw.seed)
    k_cache, v_cache = make_caches(op, size, 1 + int(table.max()), device)

    def step(
        part: Requests, table: np.ndarray, turned: bool | None = None
    ) -> tuple[BatchView, torch.Tensor]:
        tokens = sum(n for _, n in part.lengths) + part.padding
        k = draw.normal(tokens, query.kv_heads, query.head_dim, dtype=query.dtype)
        v = k[..., : query.v_head_dim]
        if not query.latent:
            v = draw.normal(tokens, query.kv_heads, query.v_head_dim, dtype=query.dtype)
        q = draw.normal(tokens, query.q_heads, query.head_dim, dtype=query.dtype, scale=2.0)
        batch = make_batch(part, table, size, device)
        plan = op.plan(batch, 0)
        if turned is not None:
            turn = _turn(draw, tokens, query.head_dim, turned)
            if op.turns(RotaryQuery(query.head_dim, query.head_dim, query.dtype)):
                return batch, op.turn_and_attend(q, k, v, turn, (k_cache, v_cache), plan)
            q, k = _turned(q, k, turn)
        op.write(k, v, k_cache, v_cache, plan)
        sinks = draw.normal(query.q_heads) if query.sinks else None
        return batch, op.attend(q, k_cache, v_cache, plan, sinks=sinks)

    past = {i: total - new for i, (total, new) in enumerate(requests.lengths) if total > new}
    if past:
        step(Requests(tuple((n, n) for n in past.values())), table[list(past)])
    batch, result = step(requests, table, turned)
    slots = torch.cat(
        [
            batch.block_tables[0][i].long()[at // size] * size + at % size
            for i, (total, _) in enumerate(requests.lengths)
            for at in [torch.arange(total, device=device)]
        ]
    )
    stored = [plain[slots // size, :, slots % size] for plain in op.canonical(k_cache, v_cache)]
    if query.kv_dtype == "int8":
        stored = [dequantize(rows) for rows in stored]
    return result[: batch.num_tokens], *stored


def run_turn(op: PagedAttention, draw: _Draw, requests: Requests, norm: bool) -> Tensors:
    """turn_and_write, or where there is none its parts: the queries, and what was written."""
    query, device = op.query, draw.device
    size = block_sizes(op)[0]
    table = scattered_blocks(requests, size, draw.seed)
    batch = make_batch(requests, table, size, device)
    caches = make_caches(op, size, 1 + int(table.max()), device)
    tokens, heads, width = len(batch.slot_mappings[0]), query.q_heads, query.head_dim
    # one buffer, as a fused projection gives it: all three are strided views
    rows = draw.normal(tokens, heads + 2 * query.kv_heads, width, dtype=query.dtype, scale=2.0)
    q, k, v = rows.split((heads, query.kv_heads, query.kv_heads), dim=1)
    v = v[..., : query.v_head_dim]
    turn = _turn(draw, tokens, width, norm)
    plan = op.plan(batch, 0)
    if op.turns(RotaryQuery(width, width, query.dtype)):
        q = op.turn_and_write(q, k, v, turn, caches, plan)
    else:
        q, k = _turned(q, k, turn)
        op.write(k, v, *caches, plan)
    slots = batch.slot_mappings[0]
    slots = slots[slots >= 0]
    stored = [plain[slots // size, :, slots % size] for plain in op.canonical(*caches)]
    if query.kv_dtype == "int8":
        stored = [dequantize(plain) for plain in stored]
    return q[: batch.num_tokens], *stored


def _turn(draw: _Draw, tokens: int, width: int, norm: bool) -> Turn:
    angles = draw.normal(64, width // 2, scale=3.0)
    turn = Turn(draw.integers(64, tokens), torch.cat([angles.cos(), angles.sin()], dim=-1))
    if norm:
        turn.norms, turn.eps = (draw.normal(width), draw.normal(width)), 1e-6
    return turn


def _turned(q: torch.Tensor, k: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    if turn.norms:
        q, k = (ops.rms_norm(x, w, turn.eps) for x, w in zip((q, k), turn.norms, strict=True))
    ops.rotary_embedding(turn.positions, q, k, turn.cos_sin, True)
    return q, k


ATTENTION_BATCHES: dict[str, Requests] = {
    "one decode": Requests(((37, 1),)),
    "first token": Requests(((1, 1),)),
    "one prompt": Requests(((33, 33),)),
    "decode, chunk and prompt": Requests(((5, 1), (130, 1), (64, 1), (70, 20), (18, 18))),
    "many unlike decodes": Requests(
        tuple((n, 1) for n in (1, 15, 16, 17, 31, 64, 65, 200, 3, 129))
    ),
    "padded": Requests(((20, 1), (9, 1)), padding=2),
}


def paged_attention(query: AttentionQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, requests: Requests, index: int) -> Tensors:
        sizes = block_sizes(op)
        return run_attention(op, draw, requests, sizes[min(index, len(sizes) - 1)])

    turned = [
        _case(
            f"turn and write, {name}{', with norms' if norm else ''}",
            lambda op, draw, name=name, norm=norm: run_turn(  # type: ignore[misc]
                op, draw, ATTENTION_BATCHES[name], norm
            ),
            device,
            seed,
        )
        for name, norm in (("decode, chunk and prompt", False), ("padded", True))
        if not query.latent  # only a part of its keys is turned
    ]
    turned += [
        _case(
            f"turn and attend, {name}{', with norms' if norm else ''}",
            lambda op, draw, name=name, norm=norm: run_attention(  # type: ignore[misc]
                op, draw, ATTENTION_BATCHES[name], block_sizes(op)[0], norm
            ),
            device,
            seed,
        )
        for name, norm in (("many unlike decodes", False), ("padded", True))
        if not query.latent and not query.sinks
    ]
    return turned + [
        _case(
            f"{name}, block size #{i}",
            lambda op, draw, r=requests, i=i: body(op, draw, r, i),  # type: ignore[misc]
            device,
            seed,
        )
        for name, requests in ATTENTION_BATCHES.items()
        for i in range(3)
    ]


def logprobs(query: SampleQuery, device: torch.device, seed: int) -> list[Case]:
    rows, vocab = max(1, min(query.max_reqs, 8)), query.vocab

    def body(op: Any, draw: _Draw, scale: float, k: int) -> Tensors:
        logits = draw.normal(rows, vocab, scale=scale)
        logits[0, vocab // 2] = -200.0
        return tuple(op(logits, draw.integers(vocab, rows), min(k, vocab)))

    return [
        _case(f"logits x{s}, k={k}", lambda op, draw, s=s, k=k: body(op, draw, s, k), device, seed)  # type: ignore[misc]
        for s in (0.5, 8.0)
        for k in (0, 1, 5, 50)
    ]


def _sequences(draw: _Draw, query: SampleQuery) -> Tensors:
    """Tokens of few kinds in a pool of more rows than are asked for; sequences among them, and factors."""
    count, width = max(1, min(query.max_reqs, 5)), 70
    tokens = draw.integers(min(query.vocab, 20), count + 2, width).int()
    tokens[:, 1::9] = query.vocab - 1
    rows = torch.arange(count, device=draw.device).flip(0) + 1
    lengths = draw.integers(width - 1, count) + 1
    lengths[0] = width
    prompts = (lengths * draw.uniform(count)).long()
    factors = torch.stack(
        (draw.uniform(count) + 0.5, draw.uniform(count) - 0.5, draw.uniform(count) - 0.5), -1
    )
    where = (rows - 1) * 2  # every second row of the logits
    return tokens, torch.stack((where, rows, prompts, lengths), -1), factors


def penalties(query: SampleQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, only: str) -> Tensors:
        tokens, sequences, factors = _sequences(draw, query)
        if only:
            factors[:, 0] = 1.0
        if only == "none":
            factors.zero_()[:, 0] = 1.0
        logits = draw.normal(2 * len(sequences), query.vocab, scale=3.0)
        logits[:, 0] = -torch.inf
        op(logits, tokens, sequences, factors, 70)
        return (logits.nan_to_num(neginf=-1e9),)

    return [
        _case(f"penalties, {name}", lambda op, draw, n=n: body(op, draw, n), device, seed)  # type: ignore[misc]
        for n, name in (("", "all"), ("output", "of the output"), ("none", "neutral"))
    ]


def token_bitmask(query: SampleQuery, device: torch.device, seed: int) -> list[Case]:
    def body(op: Any, draw: _Draw, high: int) -> Tensors:
        count = max(1, min(query.max_reqs, 5))
        words = draw.integers(high, count, -(-query.vocab // 32))
        words = torch.where(draw.uniform(*words.shape) < 0.5, words, -1 - words).int()
        logits = draw.normal(2 * count, query.vocab)
        op(logits, torch.arange(count, device=device) * 2 + 1, words)
        return (logits.nan_to_num(neginf=-1e9),)

    return [
        _case(f"words below {high}", lambda op, draw, h=high: body(op, draw, h), device, seed)  # type: ignore[misc]
        for high in (1, 1 << 31)
    ]
