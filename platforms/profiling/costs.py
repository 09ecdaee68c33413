"""What an op has to do at least: bytes that it must read and write, and operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.platforms.batch import BatchView
from headrace.platforms.queries import AttentionQuery, EmbeddingQuery, ExpertsQuery, LinearQuery

# Bytes of so many numbers in a dtype or a quantization.
Stored = Callable[[int, str], int]


@dataclass(frozen=True, slots=True)
class Cost:
    detail: str = ""  # sizes and storage
    nbytes: int = 0
    operations: int = 0


def cost(query: Any, method: str, args: tuple[Any, ...], view: BatchView, stored: Stored) -> Cost:
    """Of one call of the op bound for `query`, by its arguments and, for attention, the step's lengths."""
    tokens = args[0].shape[0]
    if isinstance(query, LinearQuery):
        return _linear(query, method, tokens, stored)
    if isinstance(query, ExpertsQuery):
        return _experts(query, args[2], tokens, stored)
    if isinstance(query, EmbeddingQuery):
        return Cost(query.scheme, 2 * stored(tokens * query.hidden, query.dtype))
    if isinstance(query, AttentionQuery) and method == "attend":
        return attend(query, view, tokens, stored)
    if isinstance(query, AttentionQuery) and method == "turn_and_attend":
        found = attend(query, view, tokens, stored)  # and new keys and values are read and written
        return replace(found, nbytes=found.nbytes + sum(2 * one.nbytes for one in args[1:3]))
    if isinstance(query, AttentionQuery):  # what is turned or written lies beside the caches
        tensors = list(args[:2] if method == "write" else args[:3])
    else:
        tensors = [one for one in args if isinstance(one, torch.Tensor) and len(one) == tokens]
    size = sum(2 * one.nbytes for one in tensors)  # read, and as much written
    return Cost(method, size)


def _linear(query: LinearQuery, method: str, tokens: int, stored: Stored) -> Cost:
    size, features = query.in_features, query.out_features
    scheme = query.scheme or query.dtype
    written = tokens * (features // 2 if method == "gated" else features)
    nbytes = stored(size * features, scheme) + stored(tokens * size + written, query.dtype)
    label = f"{size}x{features} {scheme}{' ' * bool(method)}{method}"
    return Cost(label, nbytes, 2 * tokens * size * features)


def _experts(query: ExpertsQuery, ids: torch.Tensor, tokens: int, stored: Stored) -> Cost:
    used = int(ids.unique().numel())
    numbers = used * query.hidden * query.intermediate
    nbytes = stored(2 * numbers, query.scheme or query.dtype)
    nbytes += stored(numbers, query.down_scheme or query.dtype)
    nbytes += stored(2 * tokens * query.hidden, query.dtype)
    operations = 6 * tokens * query.top_k * query.hidden * query.intermediate
    return Cost(
        f"{query.top_k} of {query.experts}, {query.hidden}x{query.intermediate}", nbytes, operations
    )


def attend(query: AttentionQuery, view: BatchView, tokens: int, stored: Stored) -> Cost:
    """Of attention over the cache, with `tokens` queries: the keys and values that they see, each read once."""
    lengths = view.seq_lens_host[: view.num_reqs].astype(np.int64)
    new = np.diff(view.query_start_loc_host[: view.num_reqs + 1]).astype(np.int64)
    window = query.window or int(lengths.max())
    read = np.minimum(lengths, window + new - 1).sum()
    # a query sees what is before it and itself
    seen = np.concatenate(
        [np.arange(end - count + 1, end + 1) for end, count in zip(lengths, new, strict=True)]
    )
    pairs = int(np.minimum(seen, window).sum())
    wide = query.head_dim + query.v_head_dim
    kept = query.head_dim if query.latent else wide
    nbytes = stored(int(read) * query.kv_heads * kept, query.kv_dtype)
    nbytes += stored(tokens * query.q_heads * wide, query.dtype)
    label = f"{query.q_heads}/{query.kv_heads}x{query.head_dim}"
    label += f" window {query.window}" if query.window else ""
    return Cost(label, nbytes, 2 * pairs * query.q_heads * wide)
