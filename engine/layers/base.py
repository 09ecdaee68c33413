"""What every layer is: a plain object that binds its ops once and, if it has weights, declares and loads them.

Nothing here or in its sisters imports torch at module level: a model can be built with a recording binder to
learn its selection queries and its size on a machine, or in a process, that has no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.weights.source import ModelError

if TYPE_CHECKING:
    import torch

    from headrace.engine.models.base import BuildContext
    from headrace.engine.weights.source import TensorHandle


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor a layer wants: its name and its whole (unsharded) shape in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    instead: str = ""  # the name of a tensor that will do when this one is absent


class Layer:
    """Base of all layers. A layer without weights of its own overrides nothing."""

    def weights(self) -> Sequence[Weight]:
        """What this layer itself reads, nested layers not included."""
        return ()

    def load(self, tensors: Mapping[str, TensorHandle]) -> None:
        """Read this rank's shard of `weights()` and pack it. Names and shapes are checked; may run in a thread."""

    def held(self) -> Sequence[Any]:
        """Tensors, or packed values that hold tensors, that live as long as the layer."""
        return ()


def walk(*roots: Any) -> Iterator[Layer]:
    """The layers among `roots` (layers or lists of them) and all nested in them, each once, in construction order."""
    seen: set[int] = set()
    stack: list[Any] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if isinstance(node, (list, tuple)):
            stack.extend(reversed(node))
        elif isinstance(node, Layer) and id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(reversed(list(vars(node).values())))


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" for torch.bfloat16, as selection queries spell it."""
    return str(dtype).removeprefix("torch.")


def shard(total: int, ctx: BuildContext, what: str) -> slice:
    """This rank's equal share of `total` rows or columns."""
    if total % ctx.world:
        raise ModelError(
            f"{total} {what} cannot be divided over {ctx.world} workers; "
            f"use a tensor parallel size that divides {total}"
        )
    size = total // ctx.world
    return slice(ctx.rank * size, (ctx.rank + 1) * size)


def shard_kv_heads(kv_heads: int, ctx: BuildContext) -> slice:
    """This rank's KV heads: an equal share, or one head held by several ranks when there are fewer than ranks."""
    if kv_heads >= ctx.world:
        return shard(kv_heads, ctx, "key/value heads")
    if ctx.world % kv_heads:
        raise ModelError(
            f"{kv_heads} key/value heads cannot be replicated evenly over {ctx.world} workers; "
            f"use a tensor parallel size that is a multiple or a divisor of {kv_heads}"
        )
    head = ctx.rank * kv_heads // ctx.world
    return slice(head, head + 1)


def tensor_bytes(values: Sequence[Any]) -> int:
    """Bytes of the distinct tensor storages inside `values`."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors inside `values` (tensors, sequences, mappings, objects with fields), in the order of a walk."""
    stack = list(values)
    while stack:
        value = stack.pop()
        if hasattr(value, "untyped_storage"):
            yield value
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif hasattr(value, "__dict__"):
            stack.extend(vars(value).values())
        elif hasattr(value, "__slots__"):
            stack.extend(getattr(value, name, None) for name in value.__slots__)
