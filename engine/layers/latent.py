"""Multi-head latent attention (DeepSeek-V2): all heads read one short row of numbers for each token of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.base import Layer, Weight, dtype_name, shard
from headrace.engine.layers.linear import Linear, Part, RowParallelLinear
from headrace.engine.layers.norm import RMSNorm
from headrace.engine.weights.source import ModelError
from headrace.platforms.kv_layout import KVSpec
from headrace.platforms.queries import AttentionQuery

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.norm import AddRMSNorm
    from headrace.engine.layers.rotary import Rotary
    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec
    from headrace.engine.weights.source import TensorHandle
    from headrace.platforms.attention import PagedAttention

# Of the norms within attention, whatever the config says of the others.
_EPS = 1e-6


class LatentAttention(Layer):
    """x [T, hidden] -> [T, hidden]. Called as Attention is.

    A token's row is kv_rank numbers, normed, and rope_dim turned ones. kv_b_proj would make each head's key and value
    of the former. It is never applied to the cache: its key half is multiplied into the queries and its value half
    applied to what attention gives, so that attention is one KV head whose values are a part of its keys.
    The ranks divide the query heads; the rows are whole on each.
    """

    impl: PagedAttention
    kv_spec: KVSpec

    def __init__(self, ctx: BuildContext, spec: ModelSpec, name: str, rotary: Rotary) -> None:
        sizes = spec.latent
        if sizes is None:
            raise ModelError(f"{name}: the model has no latent attention")
        heads = shard(spec.heads, ctx, "attention heads")
        self._ctx, self._sizes, self._heads = ctx, sizes, heads.stop - heads.start
        self._name, self._first_head, self._all_heads = name, heads.start, spec.heads
        size, width = sizes.nope_dim + sizes.rope_dim, sizes.kv_rank + sizes.rope_dim
        q_rows = slice(heads.start * size, heads.stop * size)
        row = Part(f"{name}.kv_a_proj_with_mqa", width, slice(0, width))
        self.q_norm = self.q_b = None
        if sizes.q_rank:
            first = Part(f"{name}.q_a_proj", sizes.q_rank, slice(0, sizes.q_rank))
            self.q_norm = RMSNorm(ctx, f"{name}.q_a_layernorm", sizes.q_rank, _EPS, 0.0)
            q = Part(f"{name}.q_b_proj", spec.heads * size, q_rows)
            self.q_b = Linear(ctx, (q,), sizes.q_rank, False)
        else:
            first = Part(f"{name}.q_proj", spec.heads * size, q_rows)
        self.a = Linear(ctx, (first, row), spec.hidden, False)
        self._split = (first.count, width)
        self.kv_norm = RMSNorm(ctx, f"{name}.kv_a_layernorm", sizes.kv_rank, _EPS, 0.0)
        self.rotary = rotary
        query = AttentionQuery(
            q_heads=self._heads,
            kv_heads=1,
            head_dim=width,
            v_head_dim=sizes.kv_rank,
            dtype=dtype_name(ctx.dtype),
            kv_dtype=ctx.kv_dtype,
            scale=spec.attention_scale,
            latent=True,
        )
        self.impl = ctx.ops.bind("paged_attention", query)
        inner = spec.heads * sizes.v_dim
        self.out = RowParallelLinear(ctx, f"{name}.o_proj", inner, spec.hidden, False)
        self.kv_spec = KVSpec(1, width, sizes.kv_rank, ctx.kv_dtype, latent=True)
        self._to_latent: Any = None  # [heads, nope_dim, kv_rank]
        self._to_value: Any = None  # [heads, kv_rank, v_dim]
        self._k_cache: Any = None
        self._v_cache: Any = None
        self._plan = 0

    def bind_kv(self, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: int) -> None:
        """The cache [P, 1, S, kv_rank + rope_dim], its first kv_rank numbers, and the place in StepContext.plans."""
        self._k_cache, self._v_cache, self._plan = k_cache, v_cache, plan

    def weights(self) -> Sequence[Weight]:
        rows = self._all_heads * (self._sizes.nope_dim + self._sizes.v_dim)
        return (Weight(f"{self._name}.kv_b_proj.weight", (rows, self._sizes.kv_rank)),)

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        sizes, size = self._sizes, self._sizes.nope_dim + self._sizes.v_dim
        rows = slice(self._first_head * size, (self._first_head + self._heads) * size)
        both = tensors[f"{self._name}.kv_b_proj.weight"].read(self._ctx.dtype, rows)
        both = both.to(self._ctx.device).view(self._heads, size, sizes.kv_rank)
        key, value = both.split((sizes.nope_dim, sizes.v_dim), dim=1)
        self._to_latent, self._to_value = key.contiguous(), value.mT.contiguous()

    def held(self) -> Sequence[Any]:
        return self._to_latent, self._to_value

    def __call__(
        self, positions: torch.Tensor, x: torch.Tensor, plans: Sequence[Any]
    ) -> torch.Tensor:
        return self._attend(positions, self.a(x), plans)

    def normed(
        self,
        norm: AddRMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        plans: Sequence[Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm`, then this; and the new residual."""
        both, residual, _ = self.a.normed(norm, x, residual)
        return self._attend(positions, both, plans), residual

    def _attend(
        self, positions: torch.Tensor, both: torch.Tensor, plans: Sequence[Any]
    ) -> torch.Tensor:
        import torch

        sizes, plan, caches = self._sizes, plans[self._plan], (self._k_cache, self._v_cache)
        q, row = both.split(self._split, dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_norm(q.contiguous()))
        q = q.view(q.shape[0], self._heads, -1)
        plain, turned = q.split((sizes.nope_dim, sizes.rope_dim), dim=2)
        latent, shared = row.split((sizes.kv_rank, sizes.rope_dim), dim=1)
        k = torch.cat((self.kv_norm(latent.contiguous()), shared), dim=1).unsqueeze(1)
        turned = turned.contiguous()
        self.rotary(positions, turned, k[..., sizes.kv_rank :])
        absorbed = torch.bmm(plain.transpose(0, 1), self._to_latent).transpose(0, 1)
        self.impl.write(k, k[..., : sizes.kv_rank], *caches, plan)
        attended = self.impl.attend(torch.cat((absorbed, turned), dim=2), *caches, plan)
        values = torch.bmm(attended.transpose(0, 1), self._to_value)
        return self.out(values.transpose(0, 1).flatten(1))
