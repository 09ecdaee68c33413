"""RMS norm, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name
from headrace.platforms.linear import Norm
from headrace.platforms.queries import NormQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.base import BuildContext
    from headrace.engine.weights.source import TensorHandle


class RMSNorm(Layer):
    """x / rms(x) * (offset + w) over the last axis. The factor is kept in float32 with the offset folded in."""

    def __init__(
        self, ctx: BuildContext, name: str, hidden: int, eps: float, offset: float
    ) -> None:
        self._name = f"{name}.weight"
        self._hidden = hidden
        self._offset = offset
        self._eps = eps
        self._device = ctx.device
        self._weight: Any = None
        self._norm = ctx.ops.bind("rms_norm", NormQuery(hidden, dtype_name(ctx.dtype)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._weight, self._eps)

    @property
    def rule(self) -> Norm:
        """What an op computes that has the norm in it. After load."""
        return Norm(self._weight, self._eps)

    @property
    def weight(self) -> torch.Tensor:
        """[hidden] float32, the offset folded in. After load."""
        return self._weight

    def weights(self) -> Sequence[Weight]:
        return (Weight(self._name, (self._hidden,)),)

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        import torch

        weight = tensors[self._name].read(torch.float32)
        self._weight = (weight + self._offset if self._offset else weight).to(self._device)

    def held(self) -> Sequence[Any]:
        return (self._weight,)


class AddRMSNorm(RMSNorm):
    """(norm(x + residual), x + residual); with residual None, as at the first layer, (norm(x), x)."""

    def __init__(
        self, ctx: BuildContext, name: str, hidden: int, eps: float, offset: float
    ) -> None:
        super().__init__(ctx, name, hidden, eps, offset)
        query = NormQuery(hidden, dtype_name(ctx.dtype))
        self._add_norm = ctx.ops.bind("fused_add_rms_norm", query)

    def __call__(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self._norm(x, self._weight, self._eps), x
        return self._add_norm(x, residual, self._weight, self._eps)
