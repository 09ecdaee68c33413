"""Kernels compiled side by side, before they are needed: one after the other they would make a first start long, and a
kind of step that comes first under load would wait for a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.platforms.triton.launch import Launcher

# Triton's compiler leaves Python's lock for most of its work; more threads than that wait for it.
MOST_THREADS = 16


class Zeroed(TorchDispatchMode):
    """New memory is zeros. What a kernel that is not launched leaves as it was may be read as indices by operators that
    are: PyTorch's, or a vendor's; and indices of no row end a device's context."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").removeprefix("new_")
        return made.zero_() if name in ("empty", "empty_like", "empty_strided") else made


def compile_ahead(body: Callable[[], None]) -> None:
    """Run `body` with launches of Triton's kernels compiled instead of done, and wait for all of them.

    What the kernels would compute is left at zero, so nothing that `body` computes may be used. A kernel that cannot be
    compiled is left to its first launch, which says why. Nothing is done without a compiler of many at once (Triton
    before 3.4), or where kernels are interpreted.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or triton.knobs.runtime.interpret:
        return
    linux = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    with (
        ThreadPoolExecutor(min(MOST_THREADS, processors)) as pool,
        mode(pool, ignore_errors=True),
        Zeroed(),
    ):
        Launcher.ahead = True
        try:
            body()
        finally:
            Launcher.ahead = False
