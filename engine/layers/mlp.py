"""The gated feed-forward network: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.layers.base import Layer, dtype_name
from headrace.engine.layers.linear import RowParallelLinear, gate_up_linear
from headrace.engine.weights.source import ModelError
from headrace.platforms.queries import ActivationQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.norm import AddRMSNorm
    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec

_GATED = {
    "silu": "silu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu": "gelu_and_mul",
}


class GatedMLP(Layer):
    """x [T, hidden] -> [T, hidden]."""

    def __init__(
        self, ctx: BuildContext, spec: ModelSpec, name: str, intermediate: int = 0
    ) -> None:
        size = intermediate or spec.intermediate
        if spec.activation not in _GATED:
            raise ModelError(
                f"activation {spec.activation!r} is not supported; known: {', '.join(_GATED)}"
            )
        self.gate_up = gate_up_linear(ctx, name, spec.hidden, size, spec.mlp_bias)
        query = ActivationQuery(size // ctx.world, dtype_name(ctx.dtype))
        self._act = ctx.ops.bind(_GATED[spec.activation], query)
        self._activation = spec.activation
        self._gated_rows = self.gate_up.gated_rows
        self.down = RowParallelLinear(ctx, f"{name}.down_proj", size, spec.hidden, spec.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(x))

    def normed(
        self, norm: AddRMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm`, then this; and the new residual."""
        if x.shape[0] > self._gated_rows:
            x, residual = norm(x, residual)
            return self(x), residual
        inner, residual, _ = self.gate_up.normed(norm, x, residual, self._activation)
        return self.down(inner), residual

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum over ranks."""
        return self.down.partial(self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self._gated_rows:
            return self.gate_up.gated(x, self._activation)
        inner: torch.Tensor = self._act(self.gate_up(x))
        return inner
