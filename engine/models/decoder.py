"""The common decoder: embedding, a stack of equal blocks, a final norm, the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace.engine.layers.base import Layer, tensors_in, walk
from headrace.engine.layers.decoder import DecoderBlock, SandwichBlock
from headrace.engine.layers.norm import AddRMSNorm
from headrace.engine.layers.rotary import Rotary
from headrace.engine.layers.vocabulary import Vocabulary
from headrace.engine.models.base import BuildContext, Model, StepContext
from headrace.engine.models.loading import load, match
from headrace.engine.models.spec import ModelSpec
from headrace.platforms.kv_layout import KVPlan

if TYPE_CHECKING:
    import torch

    from headrace.engine.weights.source import WeightSource


class Decoder(Model):
    """A family subclasses this and says what its blocks are; sizes and options come from the spec."""

    block: ClassVar[type[DecoderBlock] | type[SandwichBlock]] = DecoderBlock

    def __init__(self, spec: ModelSpec, ctx: BuildContext, max_model_len: int) -> None:
        self.spec = spec
        self._schemes = ctx.schemes
        size = spec.latent.rope_dim if spec.latent else spec.head_dim
        rotaries = [Rotary(ctx, rope, size, max_model_len) for rope in spec.ropes]
        which = spec.rope_of_layer or (0,) * spec.layers
        self._vocabulary = Vocabulary(ctx, spec)
        self._blocks = [self.block(ctx, spec, i, rotaries[which[i]]) for i in range(spec.layers)]
        self._norm = AddRMSNorm(ctx, "model.norm", spec.hidden, spec.norm_eps, spec.norm_offset)
        self.kv_specs = [block.attention.kv_spec for block in self._blocks]
        self.attention_impls = [block.attention.impl for block in self._blocks]
        self.plan_keys = []

    def layers(self) -> list[Layer]:
        """Every layer once: what loads, what declares weights."""
        return list(walk(self._vocabulary, self._blocks, self._norm))

    def rename(self, name: str) -> str | None:
        """The name a layer asks for, of a stored tensor; None = of no use to this model."""
        return name

    def load_weights(
        self, source: WeightSource, progress: Callable[[float, float, str], None]
    ) -> int:
        from headrace.engine.weights.encode import encoded

        layers = self.layers()
        tensors = encoded(match(source, layers, self.rename), self._schemes)
        return load(layers, tensors, source.total_bytes(), progress, self.enter_thread)

    def loaded(self) -> list[torch.Tensor]:
        return list(tensors_in([layer.held() for layer in self.layers() if layer.weights()]))

    def read_again(
        self, source: WeightSource, progress: Callable[[float, float, str], None]
    ) -> list[torch.Tensor]:
        layers = self.layers()
        before = [dict(vars(layer)) for layer in layers]
        try:
            self.load_weights(source, progress)
            return self.loaded()
        finally:
            for layer, held in zip(layers, before, strict=True):
                vars(layer).update(held)

    def bind_kv(self, plan: KVPlan, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        group_of = {layer: i for i, group in enumerate(plan.groups) for layer in group.layers}
        self.plan_keys = []
        for index, (block, (k_cache, v_cache)) in enumerate(zip(self._blocks, caches, strict=True)):
            key = (block.attention.impl, group_of[index])
            if key not in self.plan_keys:
                self.plan_keys.append(key)
            block.attention.bind_kv(k_cache, v_cache, self.plan_keys.index(key))

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        x, residual, plans = self._vocabulary.embed(token_ids), None, step.plans
        for block in self._blocks[:-1]:
            x, residual = block(x, residual, positions, plans)
        x, residual = self._blocks[-1](x, residual, positions, plans, step.wanted)
        return self._norm(x, residual)[0] if len(x) else x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.logits(hidden)
