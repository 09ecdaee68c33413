"""What all kernels of this folder share: how a launch is described and done, and dependent launches.

A kernel that depends on the one before it begins with `after_previous`, once it has done what needs none of its
results (reading weights, say), and calls `let_next_start` when the next may begin to do the same. Both are nothing
unless the launch asks for it (`launch_pdl`), which only devices that say "pdl" among their features can, with a
release of Triton that can ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.platforms import tuned

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # releases before 3.4
    gdc_launch_dependents = gdc_wait = None
# Those of release 3.4 cannot be called.
DEPENDENT = gdc_wait is not None and "_semantic" in signature(gdc_wait).parameters
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # releases before 3.4: kernels that need them are not selected
    TensorDescriptor = None


@triton.jit
def after_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


def launch_options(
    kernel: str, query: Any, runtime: Any, options: Mapping[str, Any], dependent: bool = False
) -> dict[str, Any]:
    """Constants, warps and stages of a kernel: `options` as the runtime's device wants them.

    This is the one place where launch parameters are decided: a platform changes them by
    `DeviceRuntime.kernel_options`, and what was measured on the device (`DeviceRuntime.tuned`) stands above both.
    `dependent`: the kernel knows dependent launches, by its constant PDL.
    """
    chosen = {**options, **runtime.kernel_options(kernel, query, options)}
    if runtime.tuned:
        measured = runtime.tuned.get(tuned.key(kernel, query, options), {})
        chosen |= {name: value for name, value in measured.items() if name in chosen}
    if dependent:
        chosen["PDL"] = pdl = DEPENDENT and "pdl" in runtime.info.features
        if pdl:
            chosen["launch_pdl"] = True
    return chosen


class Tiled(TensorDescriptor or object):  # type: ignore[misc]
    """A tensor of which a kernel copies blocks of one shape, zeros where they exceed it. Addresses and distances of
    rows are multiples of 16 bytes: whoever packs the tensor sees to it, once. For a launcher those are equal whose
    blocks are: where the tensor lies is said at every launch."""

    def __init__(self, tensor: torch.Tensor, *block: int) -> None:
        self.base, self.block_shape, self.padding = tensor, list(block), "zero"
        self.shape, self.strides = list(tensor.shape), list(tensor.stride())

    def shape_alone(self) -> Tiled:
        """Equal to this, and keeps no tensor alive."""
        made = object.__new__(Tiled)
        made.block_shape = self.block_shape
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiled) and self.block_shape == other.block_shape

    def __hash__(self) -> int:
        return hash(tuple(self.block_shape))


Grid = tuple[int, int, int]

_DTYPE = attrgetter("dtype")
_ADDRESS = torch.Tensor.data_ptr
# Bytes up to which Triton's compiler for AMD's devices addresses a tensor's memory with 32 bits.
SMALL = 2**31 - 1
ALIGNED = 15  # bits of an address that are 0 where kernels are compiled for aligned pointers


class Launcher:
    """A kernel with its constants, called as `launcher(grid, *tensors, *numbers)`: the order of all kernels here.

    What an eager step costs is the host's time for its launches. Triton's own way to a kernel takes 12 us or more of
    Python, to learn what the arguments are specialized on; here one look-up tells whether arguments of just these
    dtypes, alignments and numbers were launched before, and 1 us does. Numbers that change from step to step (lengths,
    rows of a batch) make an entry for each value; the table is emptied when it has grown large.
    """

    MOST_KNOWN = 4096
    ahead = False  # kernels are compiled, not launched: see ahead.py

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        # constants in capitals may be of a sister that shares the options
        names = set(kernel.arg_names)
        used = {key: value for key, value in options.items() if key in names or key.islower()}
        self._kernel, self._options = kernel, used
        self.compiled = isinstance(kernel, triton.JITFunction)  # else it is interpreted
        self._known: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._ahead: set[tuple[Any, ...]] = set()
        self._stream: Any = None
        self._tensors = 0
        self._by_size = False
        self._constants: tuple[Any, ...] = ()
        if self.compiled:
            constant = [parameter.is_constexpr for parameter in kernel.params]
            if constant != sorted(constant):
                raise TypeError(
                    f"{kernel.__name__}: constants must come behind all other arguments"
                )
            self._constants = tuple(options[p.name] for p in kernel.params if p.is_constexpr)

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        if not self.compiled:
            self._kernel[grid](*arguments, **self._options)
            return
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        address = 0
        for one in map(_ADDRESS, tensors):
            address |= one
        key = (*map(_DTYPE, tensors), *numbers)
        if address & ALIGNED:
            key += tuple(one & ALIGNED for one in map(_ADDRESS, tensors))
        if self._by_size:
            key += tuple(one.untyped_storage().nbytes() > SMALL for one in tensors)
        found = self._known.get(key)
        if found is None or Launcher.ahead:
            self._first(key, grid, arguments)
            return
        run, function, metadata = found
        stream = self._stream(tensors[0].get_device())
        # no metadata of this launch, no hooks before and after it
        run(*grid, stream, function, metadata, None, None, None, *arguments, *self._constants)

    def _first(self, key: tuple[Any, ...], grid: Grid, arguments: tuple[Any, ...]) -> None:
        """By Triton's own way, which compiles what it has not."""
        key = tuple(one.shape_alone() if isinstance(one, Tiled) else one for one in key)
        if Launcher.ahead:
            if key not in self._ahead:
                self._kernel.warmup(*arguments, grid=grid, **self._options)
            made = None
        else:
            made = self._kernel[grid](*arguments, **self._options)
        if not self._tensors:  # now it is known how the arguments are divided: no key was whole
            self._stream = triton.runtime.driver.active.get_current_stream
            self._by_size = triton.runtime.driver.active.get_current_target().backend == "hip"
            self._tensors = sum(isinstance(one, torch.Tensor) for one in arguments)
            return
        if made is None:
            self._ahead.add(key)
            return
        if len(self._known) >= self.MOST_KNOWN:
            self._known.clear()
        self._known[key] = (made.run, made.function, made.packed_metadata)


class Launchers:
    """Launchers of one kernel that differ in some of its constants."""

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        self._kernel, self.options = kernel, dict(options)
        self._made: dict[tuple[Any, ...], Launcher] = {}

    def __call__(self, **constants: Any) -> Launcher:
        key = tuple(constants.values())
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Launcher(self._kernel, {**self.options, **constants})
        return found


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`: the sizes of Triton's blocks."""
    return max(least, 1 << (n - 1).bit_length())


def warps_for(width: int) -> int:
    """Warps for a program that handles one row of `width` elements, 8 a thread or so."""
    return min(max(width // 256, 1), 16)
