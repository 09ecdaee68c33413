"""What a captured step would do, in Triton's interpreter: the plan of one step over the buffers of others.

TRITON_INTERPRET=1 python -m tests.platforms.triton.captured
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.queries import AttentionQuery
from headrace.platforms.reference.cases import (
    Requests,
    make_batch,
    make_caches,
    scattered_blocks,
)
from headrace.platforms.reference.checks.attention import _become, _Static
from headrace.platforms.triton.mla import attention_of

SIZE = 16
# (keys, new tokens) of the prompt and of the request that is padding: 96 tokens in all
STEPS = (((96, 96), (0, 0)), ((60, 60), (36, 36)), ((200, 33), (63, 63)), ((70, 1), (95, 95)))
DECODES = (((40, 1), (70, 1)), ((300, 1), (9, 1)), ((1, 1), (64, 1)))


def check(steps: tuple[tuple[tuple[int, int], ...], ...], query: AttentionQuery) -> None:
    runtime = CpuPlatform().open(CpuPlatform.probe()[0])
    op = attention_of(query, runtime)
    width = -(-300 // SIZE)
    caches = make_caches(op, SIZE, 2 * width + 1, runtime.device)
    generator = torch.Generator().manual_seed(1)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    tokens = sum(new for _, new in steps[0])
    q = torch.randn(tokens, query.q_heads, query.head_dim, generator=generator)
    batches = []
    for lengths in steps:
        requests = Requests(tuple((max(keys, 1), new) for keys, new in lengths))
        table = np.zeros((2, width), np.int32)
        made = scattered_blocks(requests, SIZE, 5)
        table[:, : made.shape[1]] = made
        batches.append(make_batch(requests, table, SIZE, runtime.device))
    static = _Static(runtime.device)
    fixed = make_batch(
        Requests(tuple((max(keys, 1), new) for keys, new in steps[0])),
        batches[0].block_tables_host[0].copy(),
        SIZE,
        runtime.device,
    )
    captured = op.plan(fixed, 0, static)
    for other in (*batches[1:], batches[0]):
        _become(fixed, other)
        op.plan(fixed, 0, static)  # fills the buffers; the plan itself stays the captured one
        got = op.attend(q, *caches, captured)
        want = op.attend(q, *caches, op.plan(other, 0))
        torch.testing.assert_close(got, want)
        assert not got.isnan().any()


if __name__ == "__main__":
    torch.set_num_threads(1)
    floats = ("float32", "float32")
    for window in (0, 40):
        plain = AttentionQuery(6, 2, 64, 64, *floats, 0.125, window=window, graph=True)
        check(STEPS, plain)
        check(DECODES, plain)
    latent = AttentionQuery(4, 1, 40, 32, *floats, 0.2, graph=True, latent=True)
    check(STEPS, latent)
    check(DECODES, latent)
