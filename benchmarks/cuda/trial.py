"""What one trial of trials.py is, and the runtime that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.platforms.queries import LinearQuery

Call = Callable[[], Any]
READ, MULTIPLY = (
    4.38e12,
    790e12,
)  # bytes and bfloat16 operations a second that an H200 was seen to do
PRODUCT = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
ROW = ("BLOCK_N", "BLOCK_K", "num_warps")
COPIES = 3  # of the weights that a load reads one after the other


@dataclass(frozen=True)
class Trial:
    section: str
    load: tuple[Any, ...]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by kernel
    way: str = ""  # a way of dividing the work, not an option of a kernel

    @property
    def label(self) -> str:
        parts = [
            ",".join(map(str, (name.split()[0].removeprefix("experts_"), *change.values())))
            for name, change in self.changes.items()
        ]
        return " ".join([self.way, *parts]).strip() or "in use"


class Changed:
    """A runtime that wants some options of some kernels otherwise; a name with sizes is for one shape."""

    def __init__(
        self, runtime: Any, changes: Mapping[str, Mapping[str, Any]], pdl: bool = True
    ) -> None:
        self._runtime, self._changes = runtime, changes
        self.info = runtime.info
        if not pdl:
            self.info = replace(self.info, features=self.info.features - {"pdl"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def kernel_options(self, kernel: str, query: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(self._runtime.kernel_options(kernel, query, options))
        shape = ""
        if isinstance(query, LinearQuery):
            shape = f"{kernel} {query.in_features}x{query.out_features}"
        rows = f"{kernel} {options.get('BLOCK_M')}"
        for name in (kernel.removesuffix("_many"), rows, shape):
            own |= self._changes.get(name, {})
        return own


def options(names: Sequence[str], *values: Sequence[int]) -> list[dict[str, int]]:
    return [dict(zip(names, one, strict=True)) for one in values]
