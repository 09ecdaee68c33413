"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, dtype_name, shard, shard_kv_heads
from headrace.engine.layers.linear import RowParallelLinear, qkv_linear
from headrace.engine.layers.norm import RMSNorm
from headrace.platforms.kv_layout import KVSpec
from headrace.platforms.queries import AttentionQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.norm import AddRMSNorm
    from headrace.engine.layers.rotary import Rotary
    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec
    from headrace.platforms.attention import PagedAttention


class Attention(Layer):
    """x [T, hidden] -> [T, hidden]: q, k, v; norms of q and k where the model has them; rotary; cache; attend; out."""

    impl: PagedAttention
    kv_spec: KVSpec

    def __init__(
        self, ctx: BuildContext, spec: ModelSpec, index: int, name: str, rotary: Rotary
    ) -> None:
        size = spec.head_dim
        q_heads = _count(shard(spec.heads, ctx, "attention heads"))
        kv_heads = _count(shard_kv_heads(spec.kv_heads, ctx))
        self._size = size
        self._heads = (q_heads, kv_heads, kv_heads)
        heads = (spec.heads, spec.kv_heads, size)
        self.qkv = qkv_linear(ctx, name, spec.hidden, heads, spec.attention_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            rule = (size, spec.norm_eps, spec.norm_offset)
            self.q_norm = RMSNorm(ctx, f"{name}.q_norm", *rule)
            self.k_norm = RMSNorm(ctx, f"{name}.k_norm", *rule)
        self.rotary = rotary
        query = AttentionQuery(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=size,
            v_head_dim=size,
            dtype=dtype_name(ctx.dtype),
            kv_dtype=ctx.kv_dtype,
            scale=spec.attention_scale or size**-0.5,
            window=spec.window(index),
            softcap=spec.attention_softcap,
        )
        self.impl = ctx.ops.bind("paged_attention", query)
        # norms, rotary and write in one pass, where the attention has that (nothing is bound in a recorder)
        self._turns = self.impl is not None and self.impl.turns(rotary.query)
        self._eps = spec.norm_eps
        self.out = RowParallelLinear(
            ctx, f"{name}.o_proj", spec.heads * size, spec.hidden, spec.output_bias
        )
        self.kv_spec = KVSpec(kv_heads, size, size, ctx.kv_dtype, query.window)
        self._k_cache: Any = None
        self._v_cache: Any = None
        self._plan = 0

    def bind_kv(self, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: int) -> None:
        """Caches [P, Hkv, S, D] of this layer, and its place in StepContext.plans."""
        self._k_cache, self._v_cache, self._plan = k_cache, v_cache, plan

    def __call__(
        self, positions: torch.Tensor, x: torch.Tensor, plans: Sequence[Any]
    ) -> torch.Tensor:
        return self._attend(positions, self.qkv(x), plans)

    def normed(
        self,
        norm: AddRMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        plans: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm`, then this; and the new residual."""
        qkv, residual, _ = self.qkv.normed(norm, x, residual)
        return self._attend(positions, qkv, plans), residual

    def _attend(
        self, positions: torch.Tensor, qkv: torch.Tensor, plans: Sequence[Any]
    ) -> torch.Tensor:
        q, k, v = qkv.view(qkv.shape[0], -1, self._size).split(self._heads, dim=1)
        plan, caches = plans[self._plan], (self._k_cache, self._v_cache)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, self.k_norm)
        if self._turns:
            weights = norms and (norms[0].weight, norms[1].weight)
            turn = self.rotary.turn(positions, weights, self._eps)
            attended = self.impl.turn_and_attend(q, k, v, turn, caches, plan)
        else:
            if norms:
                q, k = norms[0](q), norms[1](k)
            self.rotary(positions, q, k)
            self.impl.write(k, v, *caches, plan)
            attended = self.impl.attend(q, *caches, plan)
        return self.out(attended.flatten(1))


def _count(heads: slice) -> int:
    return heads.stop - heads.start
