"""Kernels compiled side by side, before they are needed: one after the other they would make a first start long, and a
kind of step that comes first under load would wait for a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import triton

from headrace.platforms.triton.launch import Launcher

# Triton's compiler leaves Python's lock for most of its work; more threads than that wait for it.
MOST_THREADS = 16


def compile_ahead(body: Callable[[], None]) -> None:
    """Run `body` with launches of Triton's kernels compiled instead of done, and wait for all of them.

    What the kernels would compute is left as it was allocated, so nothing that `body` computes may be used. A kernel
    that cannot be compiled is left to its first launch, which says why. Nothing is done without a compiler of many at
    once (Triton before 3.4), or where kernels are interpreted.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or triton.knobs.runtime.interpret:
        return
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, mode(pool, ignore_errors=True):
        Launcher.ahead = True
        try:
            body()
        finally:
            Launcher.ahead = False
