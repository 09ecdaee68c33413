"""Rows of the flag table about captured steps. Torch-free, data only."""

from __future__ import annotations

from headrace.engine.config import parse
from headrace.engine.config.flag import SCHEDULING, Flag

GRAPH_FLAGS = (
    Flag(
        "--enforce-eager",
        "graphs.eager",
        SCHEDULING,
        "Capture no steps: every op is started by itself.",
        parse.boolean,
        kind="switch",
        aliases=("--disable-cuda-graph",),
    ),
    Flag(
        "--cudagraph-capture-sizes",
        "graphs.sizes",
        SCHEDULING,
        "Sequences of the decode steps that are captured; others are padded to the next.",
        parse.counts,
        kind="many",
        aliases=("--cuda-graph-sizes", "--cuda-graph-bs"),
        metavar="N",
        default="1, 2, 4, 8, 12, 16, 24, ... to --max-num-seqs",
        example="--cudagraph-capture-sizes 1,8,64",
    ),
    Flag(
        "--max-cudagraph-capture-size",
        "graphs.largest",
        SCHEDULING,
        "Capture no decode steps of more sequences than this.",
        parse.integer(1),
        aliases=("--cuda-graph-max-bs",),
        metavar="N",
        default="--max-num-seqs",
        example="--max-cudagraph-capture-size 64",
    ),
    Flag(
        "--max-captured-prompt",
        "graphs.prompt",
        SCHEDULING,
        "Capture steps of one prompt of up to this many tokens, where attention can be captured; 0: none.",
        parse.integer(0),
        aliases=("--piecewise-cuda-graph-max-tokens",),
        metavar="N",
        example="--max-captured-prompt 256",
    ),
)
