"""torch.cuda, torch.xpu, torch.npu and torch.mps out of reach of headrace's own code.

PyTorch itself may use them as it likes: whether it is headrace that asks is seen from the caller's module.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

MODULES = ("cuda", "xpu", "npu", "mps")
WATCHED = ("headrace.", "headrace_simulated.")
touched: list[str] = []  # in this process, also when somebody caught the error


class Guard:
    """Stands where the module was. Reached by headrace, every attribute of it is an error."""

    def __init__(self, name: str, module: Any) -> None:
        self.__dict__.update(_name=name, _module=module)

    def __getattr__(self, attribute: str) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(WATCHED):
            what = f"{caller} touches torch.{self._name}.{attribute}"
            touched.append(what)
            raise AssertionError(what)
        return getattr(self._module, attribute)


def install() -> None:
    for name in MODULES:
        module = getattr(torch, name, None)
        if not isinstance(module, Guard):
            setattr(torch, name, Guard(name, module))
