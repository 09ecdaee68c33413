"""Weights to the device as they are stored, GGUF blocks unpacked there; graphs that come while the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.weights.ggml_types import GGML_TYPES, READABLE
from headrace.engine.weights.mapped_tensor import MappedTensor, Stored
from headrace.engine.weights.mapping import map_file
from headrace.engine.weights.upload import Uploader
from tests.platforms.cuda.test_engine import CudaEngine
from tests.unit.test_weights_upload import PARTS, blocks

pytestmark = pytest.mark.device

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
ROWS, COLS = 96, 512


def stored(folder: Path, name: str, upload: Uploader, shuffled: bool) -> MappedTensor:
    path = folder / f"{name}.bin"
    path.write_bytes(b"head" + blocks(name, ROWS * COLS).tobytes())
    order = np.random.default_rng(1).permutation(ROWS) if shuffled else None
    place = Stored(str(path), map_file(str(path)), 4)
    return MappedTensor("w", (ROWS, COLS), KINDS[name], place, order, upload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", READABLE)
def test_tensors_reach_the_device(runtime, tmp_path, name, shuffled, dtype):
    """Through pieces much smaller than the tensor, again and again: each is waited for before it is rewritten."""
    upload = Uploader(runtime, piece=4096, pieces=2)
    handle = stored(tmp_path, name, upload, shuffled)
    parts = [(part or slice(None), cols) for part, cols in PARTS]
    for rows, cols in parts * 3:
        want = handle.read(dtype, rows, cols)
        out = torch.full(want.shape, float("nan"), dtype=dtype, device=runtime.device)
        handle.read_into(out, rows, cols)
        assert torch.equal(out.cpu(), want), (rows, cols)
    upload.close()


@pytest.fixture(scope="module")
def tiny(runtime, tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.engine.tiny_models import make_tiny

    folder = tmp_path_factory.mktemp("llama")
    make_tiny("llama", folder)
    return folder


LENGTHS = (3, 17, 33, 64, 65, 128, 150)


def answers(engine: Any) -> list[list[int]]:
    """All at once, then one after the other, so that prompts are steps of their own."""
    from tests.engine.driver import greedy
    from tests.engine.tiny_models import prompt

    prompts = [prompt(length, seed=1) for length in LENGTHS]
    found = engine.run(prompts, greedy(24))
    for alone in (prompt(length, seed=2) for length in LENGTHS):
        found += engine.run([alone], greedy(8))
    assert not any(answer.error for answer in found)
    return [answer.tokens for answer in found]


def test_graphs_come_beforehand_and_under_load(tiny):
    """Of 1, 2, 4 and 8 requests, and of prompts of 64 to 256 tokens; answers stay what they are without graphs."""
    with CudaEngine(tiny, eager=True) as engine:
        want = answers(engine)
        assert engine.info.graphs == 0
    with CudaEngine(tiny, max_num_seqs=8) as engine:
        assert engine.info.graphs == 8
        first = answers(engine)  # while sizes are captured on their way
        seen = engine.executor.call("capture_graph")
        assert seen["graphs"] >= 3
        while seen["more"]:
            seen = engine.executor.call("capture_graph")
        assert seen["graphs"] == 8
        then = answers(engine)
    for got in (first, then):  # padding changes which kernels multiply, which may turn one tie
        assert sum(a != b for a, b in zip(got, want, strict=True)) <= 1, (got, want)


def test_graphs_take_no_more_than_was_set_aside(tiny, runtime):
    """Of device memory, the driver's own included."""
    with CudaEngine(tiny, max_num_seqs=64) as engine:
        engine.executor.call("capture_graph")
        before, _ = torch.cuda.mem_get_info()
        count = 1
        while engine.executor.call("capture_graph")["more"]:
            count += 1
        after, _ = torch.cuda.mem_get_info()
        per_graph = (before - after) / max(count - 1, 1)
        assert per_graph <= runtime.graphs().traits.graph_bytes, per_graph
