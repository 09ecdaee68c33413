"""Runs a native model by hand: reference ops, a paged cache with shuffled blocks, one BatchView a step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from headrace.engine.models.base import BuildContext, StepContext
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.registry import build_model
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import TensorHandle, WeightSource
from headrace.platforms.batch import BatchView
from headrace.platforms.collectives import Collectives, SoloCollectives
from headrace.platforms.cpu.platform import CpuPlatform
from headrace.platforms.device import DeviceInfo
from headrace.platforms.kv_layout import CANONICAL, KVGroup, KVPlan, KVSpec
from headrace.platforms.ops import Ops
from headrace.platforms.reference import implementations
from headrace.platforms.registry import Registry

BLOCK_SIZE = 16
CPU = torch.device("cpu")


@dataclass
class StateHandle(TensorHandle):
    """A TensorHandle over a tensor in memory."""

    name: str
    value: torch.Tensor
    reads: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def scheme(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    def read(
        self, dtype: torch.dtype, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        self.reads.append(self.name)
        whole = self.value.flatten(0, -2) if self.value.ndim > 2 else self.value
        part = whole[rows or slice(None)]
        part = part if cols is None else part[:, cols]
        return part.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def blocks(self, rows: slice | None = None) -> np.ndarray:
        raise TypeError("plain tensors have no blocks")


class StateSource:
    """A WeightSource over a state dict."""

    def __init__(self, spec: ModelSpec, state: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.files = cast(Any, SimpleNamespace(name="tiny"))
        self.state = state
        self.reads: list[str] = []

    def names(self) -> Iterable[str]:
        return list(self.state)

    def get(self, name: str) -> StateHandle:
        return StateHandle(name, self.state[name], self.reads)

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def close(self) -> None:
        return None


def make_ops(platform: str = "reference") -> Ops:
    """Ops of the reference alone, or of the CPU platform of this machine."""
    if platform == "cpu":
        info = CpuPlatform.probe()[0]
        rows = [*CpuPlatform().implementations(), *implementations()]
        return Ops(Registry(rows), info, CpuPlatform().open(info))
    info = DeviceInfo("test", 0, "reference", "none")
    runtime = cast(Any, SimpleNamespace(info=info, device=CPU, tuned={}))
    return Ops(Registry(implementations()), info, runtime)


def make_context(
    dtype: torch.dtype = torch.float32,
    collectives: Collectives | None = None,
    ops: Ops | None = None,
) -> BuildContext:
    name = str(dtype).removeprefix("torch.")
    return BuildContext(ops or make_ops(), dtype, collectives or SoloCollectives(), name, CPU)


def load_model(
    source: WeightSource,
    max_model_len: int = 512,
    dtype: torch.dtype = torch.float32,
    collectives: Collectives | None = None,
    ops: Ops | None = None,
) -> Decoder:
    model = build_model(source.spec, make_context(dtype, collectives, ops), max_model_len)
    model.load_weights(source, lambda done, total, text: None)
    return model


def simple_plan(model: Decoder, blocks: int) -> KVPlan:
    """One group for each window, all with `blocks` blocks; the layout that the first layer's implementation prefers."""
    impl = model.attention_impls[0]
    best = impl.kv_formats(impl.query)[0]
    size = BLOCK_SIZE if best.accepts(BLOCK_SIZE) else best.preferred_block_size
    windows = sorted({spec.window for spec in model.kv_specs})
    groups = tuple(
        KVGroup(
            window,
            tuple(i for i, spec in enumerate(model.kv_specs) if spec.window == window),
            bytes_per_block=0,
            num_blocks=blocks,
        )
        for window in windows
    )
    return KVPlan(best.layout, size, model.kv_specs[0].dtype, groups)


def make_cache(plan: KVPlan, spec: KVSpec, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Filled with garbage, so that a read of a slot that nobody wrote shows."""
    size = {"P": blocks, "K": 2, "H": spec.kv_heads, "S": plan.block_size, "D": spec.head_dim}
    if spec.latent:
        size["K"] = 1
    stored = torch.full([size[axis] for axis in plan.layout], 1e4, dtype=getattr(torch, spec.dtype))
    both = stored.permute([plan.layout.index(axis) for axis in CANONICAL])
    return both[:, 0], both[:, size["K"] - 1, ..., : spec.v_head_dim]


@dataclass
class Running:
    """A request: how many of its tokens are cached, and its blocks in each KV group."""

    blocks: list[list[int]]
    computed: int = 0


class Engine:
    """A model with caches of `blocks` blocks a group. Blocks are handed out in random order."""

    def __init__(self, model: Decoder, blocks: int = 64) -> None:
        self.model = model
        self.plan = simple_plan(model, blocks)
        self.size = self.plan.block_size
        model.bind_kv(self.plan, [make_cache(self.plan, spec, blocks) for spec in model.kv_specs])
        order = random.Random(0)
        self.free = [order.sample(range(1, blocks), blocks - 1) for _ in self.plan.groups]

    def sequence(self) -> Running:
        return Running([[] for _ in self.plan.groups])

    @torch.inference_mode()
    def step(
        self, work: Sequence[tuple[Running, Sequence[int]]], wanted: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Computes the next tokens of each sequence; float32 logits [new tokens, vocab] of each, or of the `wanted`
        tokens of the step, [1, vocab] each."""
        counts = np.array([len(tokens) for _, tokens in work], np.int32)
        view, positions = self._view([seq for seq, _ in work], counts)
        token_ids = torch.tensor([t for _, tokens in work for t in tokens], dtype=torch.int32)
        plans = [impl.plan(view, group) for impl, group in self.model.plan_keys]
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        hidden = self.model.forward(token_ids, positions, StepContext(plans, rows))
        for (seq, _), count in zip(work, counts, strict=True):
            seq.computed += int(count)
        sizes = counts.tolist() if wanted is None else [1] * len(wanted)
        return list(self.model.logits(hidden).split(sizes)) if sizes else []

    def run(self, seq: Running, tokens: Sequence[int], chunk: int = 0) -> torch.Tensor:
        """A prompt in chunks (0 = at once); logits [tokens, vocab]."""
        size = chunk or len(tokens)
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        return torch.cat([self.step([(seq, part)])[0] for part in parts])

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        seq = self.sequence()
        answer = [int(self.run(seq, tokens)[-1].argmax())]
        while len(answer) < count:
            answer.append(int(self.step([(seq, answer[-1:])])[0][-1].argmax()))
        return answer

    def _view(self, seqs: list[Running], counts: np.ndarray) -> tuple[BatchView, torch.Tensor]:
        computed = np.array([seq.computed for seq in seqs], np.int32)
        lens = computed + counts
        positions = np.concatenate(
            [np.arange(c, n, dtype=np.int64) for c, n in zip(computed, lens, strict=True)]
        )
        owner = np.repeat(np.arange(len(seqs)), counts)
        starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        tables, slots = [], []
        width = -(-int(lens.max()) // self.size)
        for group in range(len(self.plan.groups)):
            table = np.zeros((len(seqs), width), np.int32)
            for row, (seq, length) in enumerate(zip(seqs, lens, strict=True)):
                while len(seq.blocks[group]) * self.size < length:
                    seq.blocks[group].append(self.free[group].pop())
                table[row, : len(seq.blocks[group])] = seq.blocks[group]
            tables.append(table)
            block = table[owner, positions // self.size].astype(np.int64)
            slots.append(torch.from_numpy(block * self.size + positions % self.size))
        view = BatchView(
            num_reqs=len(seqs),
            num_tokens=len(positions),
            num_decode_reqs=int((counts == 1).cumprod().sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(lens.max()),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            block_tables=[torch.from_numpy(table) for table in tables],
            slot_mappings=slots,
            query_start_loc_host=starts,
            seq_lens_host=lens,
            block_tables_host=tables,
            block_size=self.size,
        )
        return view, torch.from_numpy(positions)
