"""Steps with prompts and chunks against the reference, in Triton's interpreter: programs that take several tiles,
blocks of keys that are several of the cache or parts of one, and decodes beside.

TRITON_INTERPRET=1 python -m tests.platforms.triton.prompts
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.ops import CONTRACTS
from headrace.platforms.reference import cases
from headrace.platforms.reference.attention import ReferenceAttention
from headrace.platforms.reference.cases import Requests
from headrace.platforms.reference.compare import measure, tolerance_of
from headrace.platforms.triton.attention import TritonAttention
from tests.platforms.triton.queries import attention

# (keys, new tokens): decodes, a chunk behind others, prompts; of one prompt with a row of padding
STEPS = (
    Requests(((37, 1), (5, 1), (90, 20), (50, 50), (17, 17))),
    Requests(((70, 70),), padding=1),
)
# query heads for a KV head that do not divide a tile; windows within a block of keys and beyond it
QUERIES = (
    attention(6, 2, 24, "float32"),
    attention(5, 1, 32, "float32", sinks=True, v_head_dim=16),
    attention(4, 4, 16, "float32", sinks=True, window=7),
    attention(4, 2, 16, "float32", window=40, softcap=5.0),
    attention(3, 1, 48, "float16", window=25),
    attention(4, 2, 32, "float16", kv_dtype="fp8_e4m3"),
)
TILE = 16
# programs for each KV head (0: one for each tile), BLOCK_N, block size of the cache
WAYS = ((2, 32, 16), (0, 16, 32), (3, 16, 16))


def main() -> int:
    torch.set_num_threads(1)
    runtime: Any = CpuPlatform().open(CpuPlatform.probe()[0])
    wrong = 0
    for index, (_, query) in enumerate(QUERIES):
        programs, keys, size = WAYS[index % len(WAYS)]
        changes = {
            "prefill": {"BLOCK_M": TILE, "BLOCK_N": keys, "PROGRAMS": programs},
            "decode": {"BLOCK_N": 16, "AHEAD": index % 2 == 0},
        }
        runtime.kernel_options = lambda kernel, _query, _, changes=changes: changes.get(
            kernel.removesuffix("_beside"), {}
        )
        runtime.info = replace(runtime.info, units=query.kv_heads)
        op = TritonAttention(query, runtime)
        op.overlap = (
            index % 3 != 0
        )  # nothing waits here: it is what each program does that is tested
        reference = ReferenceAttention(query, runtime)
        tolerance = tolerance_of(CONTRACTS["paged_attention"], query)
        for step in STEPS:
            got, want = (
                cases.run_attention(one, cases._Draw(runtime.device, index), step, size)
                for one in (op, reference)
            )
            error, excess = measure(got, want, tolerance)
            if excess > 1:
                wrong += 1
                print(f"{query} {step} {programs, keys, size}: {error}, {excess} times too much")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
