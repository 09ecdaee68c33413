"""Loading a checkpoint into layers: every tensor accounted for first, then read and packed by a few threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from headrace.engine.layers.base import Layer, Weight, tensor_bytes
from headrace.engine.weights.source import ModelError

if TYPE_CHECKING:
    from headrace.engine.weights.source import TensorHandle, WeightSource

# Tables that old checkpoints store although they follow from the config, or that the spec already holds.
_HARMLESS = ("rotary_emb.inv_freq", "rope_freqs.weight")

# Names of each kind in one message: a layer with experts has hundreds of tensors.
_NAMED = 12

# Reading and dequantizing release the interpreter lock; more threads only hold more temporaries.
_THREADS = 4


def match(
    source: WeightSource,
    layers: Iterable[Layer],
    rename: Callable[[str], str | None],
) -> dict[str, TensorHandle]:
    """The source's tensors by the layers' names. ModelError names every missing, surplus or misshapen one at once.

    `rename` maps a stored name to a layer's name, or to None when the model has no use for it.
    """
    stored = {new: name for name in source.names() if (new := rename(name)) is not None}
    wanted = {weight.name: weight for layer in layers for weight in layer.weights()}
    _swap_tied(stored, wanted)
    missing = [n for n, weight in wanted.items() if n not in stored and not weight.optional]
    surplus = [n for n in stored if n not in wanted and not n.endswith(_HARMLESS)]
    tensors = {name: source.get(stored[name]) for name in wanted if name in stored}
    wrong = [
        f"{name} is {list(handle.shape)} instead of {list(wanted[name].shape)}"
        for name, handle in tensors.items()
        if tuple(handle.shape) != wanted[name].shape
    ]
    problems = [
        f"{kind}: {', '.join(names[:_NAMED])}{_more(names)}"
        for kind, names in (("missing", missing), ("unexpected", surplus), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise ModelError(
            f"the weights in {source.files.name} do not fit a {source.spec.architecture} model of the size that its "
            f"config describes ({'; '.join(problems)}); get a complete checkpoint with its own config"
        )
    return tensors


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""


def load(
    layers: Sequence[Layer],
    tensors: Mapping[str, TensorHandle],
    total_bytes: int,
    progress: Callable[[float, float, str], None],
    enter_thread: Callable[[], None] | None = None,
) -> int:
    """Load every layer; returns the bytes held. `progress` is called from this thread, in bytes of the source."""
    sizes = [sum(math.prod(weight.shape) for weight in layer.weights()) for layer in layers]
    per_element = total_bytes / max(sum(sizes), 1)
    done = 0
    with ThreadPoolExecutor(_THREADS, "load", initializer=enter_thread) as pool:
        waiting = {
            pool.submit(layer.load, tensors): size
            for layer, size in zip(layers, sizes, strict=True)
        }
        try:
            for future in as_completed(waiting):
                future.result()
                done += waiting[future]
                progress(done * per_element, total_bytes, "weights")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tensor_bytes([layer.held() for layer in layers])


def _swap_tied(stored: dict[str, str], wanted: Mapping[str, Weight]) -> None:
    """A tied table that is stored under the head's name only is the embedding all the same."""
    for name, weight in wanted.items():
        twin = weight.instead
        if twin and name not in stored and twin in stored:
            stored[name] = stored.pop(twin)
