"""Mixture of experts: a router sends each token to a few of many gated feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name, shard
from headrace.engine.layers.linear import Linear, Part, matrix_name, stored_blocks
from headrace.engine.layers.mlp import GatedMLP
from headrace.platforms.queries import ExpertsQuery, RouterQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.norm import AddRMSNorm
    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec
    from headrace.engine.weights.source import TensorHandle


class MoE(Layer):
    """x [T, hidden] -> [T, hidden]: the chosen experts' weighted sum, plus a shared expert where there is one.

    Every rank holds a share of every expert's intermediate features; the router is whole on every rank.
    """

    def __init__(self, ctx: BuildContext, spec: ModelSpec, name: str) -> None:
        experts, top_k = spec.experts, spec.experts_per_token
        self._rule = (top_k, spec.norm_topk_prob)
        # float32 logits: what decides between experts is not rounded to the compute dtype
        self.gate = _replicated(ctx, f"{name}.gate", spec.hidden, experts, "float32")
        routing = spec.routing
        router = RouterQuery(
            experts,
            *self._rule,
            scoring=routing.scoring,
            groups=routing.groups,
            top_groups=routing.top_groups,
            bias=routing.bias,
            scale=routing.scale,
        )
        self._route = ctx.ops.bind("topk_softmax", router)
        self._device = ctx.device
        self._bias: tuple[Any, ...] = ()
        self._bias_weights: tuple[Weight, ...] = ()
        if routing.bias:
            self._bias_weights = (Weight(f"{name}.gate.e_score_correction_bias", (experts,)),)
        self.experts = Experts(ctx, spec, f"{name}.experts")
        self.shared = self.shared_gate = None
        if spec.shared_intermediate:
            self.shared = GatedMLP(ctx, spec, f"{name}.shared_expert", spec.shared_intermediate)
            if spec.shared_gate:
                self.shared_gate = _replicated(ctx, f"{name}.shared_expert_gate", spec.hidden, 1)
        self._all_reduce = ctx.collectives.all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._routed(x, self.gate(x))

    def normed(
        self, norm: AddRMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm`, then this; and the new residual."""
        logits, residual, kept = self.gate.normed(norm, x, residual, keep=True)
        assert kept is not None
        return self._routed(kept, logits), residual

    def _routed(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = self._route(logits, *self._rule, *self._bias)
        y = self.experts(x, weights, ids)
        if self.shared is not None:
            shared = self.shared.partial(x)
            y = y + (self.shared_gate(x).sigmoid() * shared if self.shared_gate else shared)
        return self._all_reduce(y)

    def weights(self) -> Sequence[Weight]:
        return self._bias_weights

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        import torch

        self._bias = tuple(
            tensors[weight.name].read(torch.float32).to(self._device)
            for weight in self._bias_weights
        )

    def held(self) -> Sequence[Any]:
        return self._bias


def _replicated(
    ctx: BuildContext, name: str, in_features: int, out_features: int, out_dtype: str = ""
) -> Linear:
    part = Part(name, out_features, slice(0, out_features))
    return Linear(ctx, (part,), in_features, False, out_dtype=out_dtype)


class Experts(Layer):
    """x [T, hidden], weights [T, K], ids [T, K] -> this rank's term of the weighted sum [T, hidden].

    Stored blocks are kept where the device computes with them and all experts of the layer are stored alike.
    """

    def __init__(self, ctx: BuildContext, spec: ModelSpec, name: str) -> None:
        hidden, size = spec.hidden, spec.moe_intermediate
        share = shard(size, ctx, "intermediate features of an expert")
        whole = slice(0, hidden)
        names = [f"{name}.{expert}" for expert in range(spec.experts)]
        gate_up = [[Part(f"{n}.{p}_proj", size, share) for p in ("gate", "up")] for n in names]
        down = [[Part(f"{n}.down_proj", hidden, whole)] for n in names]
        self._ctx = ctx
        self._gate_up, self._down = _Stack(gate_up, hidden, whole), _Stack(down, size, share)
        sizes = (spec.experts, spec.experts_per_token, hidden, share.stop - share.start)
        schemes = (self._gate_up.scheme(ctx.schemes), self._down.scheme(ctx.schemes))
        query = ExpertsQuery(*sizes, dtype_name(ctx.dtype), *schemes, spec.activation)
        if (query.scheme or query.down_scheme) and not ctx.ops.can("fused_experts", query):
            query = replace(query, scheme="", down_scheme="")
        self._query = query
        self._op = ctx.ops.bind("fused_experts", query)
        self._packed: Any = None

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._op(x, weights, ids, self._packed)

    def weights(self) -> Sequence[Weight]:
        return [*self._gate_up.weights(), *self._down.weights()]

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        self._packed = self._op.pack_named(
            matrix_name(self._gate_up.experts[0], self._gate_up.cols),
            partial(self._gate_up.read, self._ctx, tensors, self._query.scheme),
            partial(self._down.read, self._ctx, tensors, self._query.down_scheme),
        )

    def held(self) -> Sequence[Any]:
        return (self._packed,)


@dataclass(frozen=True, slots=True)
class _Stack:
    """One matrix of every expert, made of the same parts, with the columns of them that this rank holds."""

    experts: Sequence[Sequence[Part]]
    in_features: int
    cols: slice

    def weights(self) -> list[Weight]:
        parts = [part for parts in self.experts for part in parts]
        return [Weight(f"{p.name}.weight", (p.out_features, self.in_features)) for p in parts]

    def scheme(self, schemes: Mapping[str, str]) -> str:
        """The quantization that all of it is stored in; "" when it is plain or mixed."""
        found = {schemes.get(weight.name, "") for weight in self.weights()}
        return found.pop() if len(found) == 1 else ""

    def read(self, ctx: BuildContext, tensors: Mapping[str, TensorHandle], scheme: str) -> Any:
        """What ExpertsImpl.pack takes: a tensor [E, rows, columns], or the blocks of each expert when asked for."""
        if scheme:
            return _Blocks(self, tensors)
        import torch

        rows = sum(part.count for part in self.experts[0])
        cols = None if self.cols == slice(0, self.in_features) else self.cols
        width = self.cols.stop - self.cols.start
        stack = torch.empty(len(self.experts), rows, width, dtype=ctx.dtype, device=ctx.device)
        for matrix, parts in zip(stack, self.experts, strict=True):
            start = 0
            for part in parts:
                handle, stop = tensors[f"{part.name}.weight"], start + part.count
                handle.read_into(matrix[start:stop], part.rows, cols)
                start = stop
        return stack


class _Blocks(Sequence[Any]):
    """The stored blocks of each expert, read when asked for: never more than one expert's copy at a time."""

    def __init__(self, stack: _Stack, tensors: Mapping[str, TensorHandle]) -> None:
        self._stack, self._tensors = stack, tensors

    def __len__(self) -> int:
        return len(self._stack.experts)

    def __getitem__(self, expert: Any) -> Any:
        stack = self._stack
        return stored_blocks(self._tensors, stack.experts[expert], stack.in_features, stack.cols)
