"""What the runner needs of a model, and what a model is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine.models.spec import ModelSpec
from headrace.platforms.attention import PagedAttention
from headrace.platforms.kv_layout import KVPlan, KVSpec

if TYPE_CHECKING:
    import torch

    from headrace.engine.weights.source import WeightSource
    from headrace.platforms.collectives import Collectives
    from headrace.platforms.ops import Ops


@dataclass(slots=True)
class BuildContext:
    """Handed to every layer's constructor: bound ops, dtype and the tensor-parallel group. No globals."""

    ops: Ops
    dtype: torch.dtype
    collectives: Collectives
    kv_dtype: str
    device: torch.device
    # Stored tensor -> its quantization ("Q4_1"), for those whose blocks may be computed with as they are.
    schemes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world(self) -> int:
        return self.collectives.world


@dataclass(slots=True)
class StepContext:
    """One step's attention plans, one for each entry of `Model.plan_keys`, in order; and the rows [R] int64 whose
    hidden states are wanted (None = all): the last block computes no others behind its attention."""

    plans: list[Any] = field(default_factory=list)
    wanted: torch.Tensor | None = None


class Model(ABC):
    """A decoder on one rank. Everything enqueues on the current stream; nothing reads device data on the host."""

    spec: ModelSpec
    kv_specs: list[KVSpec]  # one a layer, on this rank
    # One attention implementation instance a layer; layers with equal queries share an instance.
    attention_impls: list[PagedAttention]
    # Distinct (implementation, KV group) pairs, known after bind_kv: the runner makes one plan for each.
    plan_keys: list[tuple[PagedAttention, int]]

    # What threads that load call first: which device is current is each thread's own matter.
    enter_thread: Callable[[], None] | None = None

    @abstractmethod
    def load_weights(
        self, source: WeightSource, progress: Callable[[float, float, str], None]
    ) -> int:
        """Read, shard, pack. Returns bytes held. Every missing, surplus or misshapen tensor is named (ModelError)."""

    @abstractmethod
    def loaded(self) -> Sequence[torch.Tensor]:
        """Every tensor that `load_weights` made, in an order that is always the same."""

    @abstractmethod
    def read_again(
        self, source: WeightSource, progress: Callable[[float, float, str], None]
    ) -> Sequence[torch.Tensor]:
        """What `load_weights` would make now, in the order of `loaded`. The model keeps what it has: addresses within
        it may be part of graphs."""

    @abstractmethod
    def bind_kv(self, plan: KVPlan, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give each layer its K and V views [P, Hkv, S, D] and its group of the plan."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """token_ids [T] int32, positions [T] int64 -> final normed hidden states [T, hidden], or of the wanted rows."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] -> float32 [R, vocab], soft-capped where the model does; the whole vocabulary."""
