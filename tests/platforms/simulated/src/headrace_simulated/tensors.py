"""A device "sim" for PyTorch: its tensors hold host tensors that nothing else can reach.

PyTorch's PrivateUse1 slot gives the device its name; each tensor is a wrapper whose operators run on what it holds.
What a real accelerator refuses is refused here: an operator over tensors of the device and of the host together, a wait
for the device inside a capture. And what goes wrong there goes wrong here: a copy to the host that nobody waits for has
delivered nothing yet, and host memory that is rewritten while the device may still read it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
# Operators that may take tensors of both sides: copies, and indices that lie on the host.
MIXED = ("aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_", "aten::_to_copy")
# Operators whose result depends on numbers that only the device knows: they wait for it, so no graph may hold them.
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")

_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)

# What is recorded while a graph is captured: (operator, arguments, results), all on held tensors.
Recorded = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
_recording: list[Recorded] | None = None


class SimError(RuntimeError):
    """What a real device would refuse, or what would corrupt results there."""


class Pending:
    """Copies between host and device that were started and that nobody has waited for."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []
        self._done = 0

    @property
    def started(self) -> int:
        return self._done + len(self._ends)

    def start(self, end: Callable[[], None]) -> None:
        self._ends.append(end)

    def finish(self, until: int | None = None) -> None:
        """All of them, or those that were started before there were `until`."""
        until = self.started if until is None else until
        while self._done < until and self._ends:
            self._done += 1
            self._ends.pop(0)()


PENDING = Pending()


def poison(tensor: torch.Tensor) -> None:
    """Numbers that nobody can take for results."""
    tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 77)


class SimTensor(torch.Tensor):
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise SimError("numpy() of a tensor on the device: copy it to the host first")

    def tolist(self) -> Any:
        raise_if_recording("tolist")
        PENDING.finish()
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def raise_if_recording(what: str) -> None:
    if _recording is not None:
        raise SimError(f"{what} waits for the device, which a capture forbids")


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator on what the tensors hold. Its results are on the device unless it copies to the host."""
    name = func._schema.name
    if func._can_decompose():  # in inference mode operators made of others come whole
        return func.decompose(*args, **kwargs)
    _refuse_mixtures(name, args, kwargs)
    if name == "aten::copy_" and isinstance(args[0], SimTensor) != isinstance(args[1], SimTensor):
        return _copy(*args, **kwargs)
    if name in WAITS or (name == "aten::_to_copy" and _to_host(kwargs)):
        raise_if_recording(name)
        PENDING.finish()
    known: dict[int, Any] = {}

    def inner(value: Any) -> Any:
        if isinstance(value, SimTensor):
            known[id(value.held)] = value
            return value.held
        if isinstance(value, torch.Tensor):
            known[id(value)] = value
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    to_host = name == "aten::_to_copy" and _to_host(kwargs)

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, SimTensor):
            return value
        if id(value) in known:  # in place
            if known[id(value)].shape != value.shape:
                raise SimError(f"{name} resized a tensor of the device")
            return known[id(value)]
        return value if to_host else SimTensor(value)

    own_args, own_kwargs = tree_map(inner, args), tree_map(inner, kwargs)
    own_kwargs.pop("pin_memory", None)
    # What is held is made outside of inference mode, whoever asks: a view may be taken of it inside and outside.
    with torch.inference_mode(False), torch.no_grad():
        result = func(*own_args, **own_kwargs)
        made = tree_map(outer, result)
    if _recording is not None:
        _recording.append((func, own_args, own_kwargs, result))
    return made


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between host and device. Without a wait the host sees the numbers, and may use its memory again, later."""
    raise_if_recording("a copy between host and device")
    if isinstance(source, SimTensor):
        with torch.inference_mode(False):
            now = source.held.clone()
        if non_blocking:
            poison(target)
            PENDING.start(lambda: _deliver(target, now))
        else:
            PENDING.finish()
            target.copy_(now)
        return target
    assert isinstance(target, SimTensor)
    target.held.copy_(source)
    if non_blocking:
        before = source.clone()
        PENDING.start(lambda: _check_unchanged(source, before))
    return target


def _deliver(target: torch.Tensor, numbers: torch.Tensor) -> None:
    with torch.inference_mode():
        target.copy_(numbers)


def _check_unchanged(source: torch.Tensor, before: torch.Tensor) -> None:
    now, then = (t.contiguous().flatten().view(torch.uint8) for t in (source, before))
    if not torch.equal(now, then):
        raise SimError("host memory was rewritten before the device had read it")


def _to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _refuse_mixtures(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One device a call; numbers (tensors without dimensions) may come from the host."""
    if name in MIXED:
        return
    found: list[torch.Tensor] = []
    tree_map(lambda v: found.append(v) if isinstance(v, torch.Tensor) else None, (args, kwargs))
    wide = [tensor for tensor in found if tensor.dim()]
    if any(isinstance(t, SimTensor) for t in found) and not all(
        isinstance(t, SimTensor) for t in wide
    ):
        raise SimError(f"{name} got tensors on the device and on the host")


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Every operator on the device inside the block."""
    global _recording
    _recording = []
    try:
        yield _recording
    finally:
        _recording = None


def _factory(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(func, args, kwargs)


_library = torch.library.Library("aten", "IMPL")


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """What PyTorch makes of an assignment such as x[i] = 1."""
    return run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


_aten = torch.ops.aten
_library.impl("_copy_from", _copy_from, "PrivateUse1")
for _overload in (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
):
    _library.impl(_overload, _factory(_overload), "PrivateUse1")
