"""Decoder blocks: attention and feed-forward around a residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.layers.attention import Attention
from headrace.engine.layers.base import Layer
from headrace.engine.layers.latent import LatentAttention
from headrace.engine.layers.mlp import GatedMLP
from headrace.engine.layers.moe import MoE
from headrace.engine.layers.norm import AddRMSNorm, RMSNorm

if TYPE_CHECKING:
    import torch

    from headrace.engine.layers.rotary import Rotary
    from headrace.engine.models.base import BuildContext
    from headrace.engine.models.spec import ModelSpec


class DecoderBlock(Layer):
    """Norms before attention and before the feed-forward network (Llama and most others).

    (x, residual) -> (x, residual): the sum of both is the block's output; it is taken by the next block's first norm,
    where it costs one fused op. `residual` is None at the first block. Behind attention only the rows `wanted` go on.
    """

    attention: Attention | LatentAttention

    def __init__(self, ctx: BuildContext, spec: ModelSpec, index: int, rotary: Rotary) -> None:
        name = f"model.layers.{index}"
        rule = (spec.hidden, spec.norm_eps, spec.norm_offset)
        self.input_norm = AddRMSNorm(ctx, f"{name}.input_layernorm", *rule)
        if spec.latent:
            self.attention = LatentAttention(ctx, spec, f"{name}.self_attn", rotary)
        else:
            self.attention = Attention(ctx, spec, index, f"{name}.self_attn", rotary)
        self.mlp_norm = AddRMSNorm(ctx, f"{name}.post_attention_layernorm", *rule)
        self.mlp = (MoE if spec.sparse(index) else GatedMLP)(ctx, spec, f"{name}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        plans: Sequence[Any],
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attention.normed(self.input_norm, x, residual, positions, plans)
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            if not len(wanted):
                return x, residual
        return self.mlp.normed(self.mlp_norm, x, residual)


class SandwichBlock(Layer):
    """Norms before and after attention and the feed-forward network (Gemma 2 and 3). Called as DecoderBlock is."""

    attention: Attention

    def __init__(self, ctx: BuildContext, spec: ModelSpec, index: int, rotary: Rotary) -> None:
        name = f"model.layers.{index}"
        rule = (spec.hidden, spec.norm_eps, spec.norm_offset)
        self.input_norm = AddRMSNorm(ctx, f"{name}.input_layernorm", *rule)
        self.attention = Attention(ctx, spec, index, f"{name}.self_attn", rotary)
        self.attention_norm = RMSNorm(ctx, f"{name}.post_attention_layernorm", *rule)
        self.mlp_norm = AddRMSNorm(ctx, f"{name}.pre_feedforward_layernorm", *rule)
        self.mlp = GatedMLP(ctx, spec, f"{name}.mlp")
        self.output_norm = RMSNorm(ctx, f"{name}.post_feedforward_layernorm", *rule)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        plans: Sequence[Any],
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attention.normed(self.input_norm, x, residual, positions, plans)
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            if not len(wanted):
                return x, residual
        x, residual = self.mlp.normed(self.mlp_norm, self.attention_norm(x), residual)
        return self.output_norm(x), residual
