"""The paged-attention contract: one class, one plan a step, write and attend a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.platforms.batch import BatchView
from headrace.platforms.device import DeviceRuntime
from headrace.platforms.graph import GraphSupport
from headrace.platforms.kv_layout import KVFormat
from headrace.platforms.queries import AttentionQuery, RotaryQuery

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Turn:
    """What heads go through before attention: an RMS norm of each q and k head where the model has one, then rotary
    embedding. Conventions: the ops "rms_norm" and "rotary_embedding"."""

    positions: torch.Tensor  # [T] int64
    cos_sin: torch.Tensor  # [L, R] float32
    norms: tuple[torch.Tensor, torch.Tensor] | None = None  # of q and of k, [D] float32
    eps: float = 0.0


class PagedAttention(ABC):
    """Varlen attention over a paged KV cache: prefill, chunks, decode and mixtures in one call.

    Conventions that corrupt results silently when missed: the causal mask is aligned to the bottom right (query i of
    n sees seq_len - n + i + 1 keys); `window` counts visible keys including the query's own; slot -1 is skipped;
    block tables are int32, slots int64; if a log-sum-exp is returned it is the natural one.
    """

    graph: ClassVar[GraphSupport] = GraphSupport.NEVER
    # Whether `plan` looks at what is in the device's block tables. Else those of a captured step may be filled after
    # it, by the step.
    reads_tables: ClassVar[bool] = False

    def __init__(self, query: AttentionQuery, runtime: DeviceRuntime) -> None:
        self.query = query
        self.runtime = runtime

    @classmethod
    @abstractmethod
    def kv_formats(cls, query: AttentionQuery) -> Sequence[KVFormat]:
        """Layouts and block sizes this implementation reads, best first. Pure."""

    @abstractmethod
    def plan(self, batch: BatchView, group: int, static: Any | None = None) -> Any:
        """Host work of a step for one KV group, outside captures. With `static`, fill buffers of fixed address."""

    @abstractmethod
    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
    ) -> None:
        """Scatter k, v [T, Hkv, D] into the caches [P, Hkv, S, D] at the plan's slots. Capturable.

        int8 caches are [P, Hkv, S, D + 4] (kv_layout.SCALE_BYTES): round(x / scale) to even with scale = max|x| / 127
        of the row, then the scale. A row with a number that is not finite gets the scale NaN. fp8_e4m3 caches hold
        the numbers themselves, rounded to the nearest even and at most 448 in size; NaN stays NaN.
        With `latent` queries v is k[..., :Dv] and v_cache a view of k_cache: what is written there is equal.
        """

    def turns(self, rotary: RotaryQuery) -> bool:
        """Whether `turn_and_write` serves this rotary embedding. Layers then call it instead of the parts."""
        return False

    def turn_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        turn: Turn,
        caches: tuple[torch.Tensor, torch.Tensor],
        plan: Any,
    ) -> torch.Tensor:
        """Norm, rotary embedding and `write` in one pass: the queries [T, Hq, D] to attend with.

        q, k, v as views of one projection; any of them may be changed in place. Equal to the parts one after the
        other, each of which rounds to q's dtype.
        """
        raise NotImplementedError

    def turn_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        turn: Turn,
        caches: tuple[torch.Tensor, torch.Tensor],
        plan: Any,
    ) -> torch.Tensor:
        """`turn_and_write`, then `attend` with what it gave."""
        return self.attend(self.turn_and_write(q, k, v, turn, caches, plan), *caches, plan)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]. Capturable, no host synchronisation.

        `sinks` [Hq] float32: an extra logit of each head that takes probability and has no value. Tokens from the
        batch's `num_tokens` on are padding; their rows of the result are finite but mean nothing.
        """

    def canonical(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches as plain [P, Hkv, S, D]: what blocks are when they leave the device. A copy where the
        implementation packs them in an order of its own (KVFormat.packing)."""
        return k_cache, v_cache
