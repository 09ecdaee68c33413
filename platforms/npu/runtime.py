"""An Ascend device opened in a worker. What all devices of PyTorch share is in headrace.platforms.torch_device."""

from __future__ import annotations

from headrace.platforms.device import DeviceInfo
from headrace.platforms.graph import GraphBackend
from headrace.platforms.npu import versions
from headrace.platforms.npu.recorder import Captures
from headrace.platforms.torch_device.runtime import TorchRuntime


class NpuRuntime(TorchRuntime):
    device_type = "npu"

    def __init__(self, info: DeviceInfo) -> None:
        register()
        super().__init__(info)
        self.captures = Captures()
        npu = self._module
        # compiling each op for each shape at run time would take seconds a step
        npu.set_compile_mode(jit_compile=False)
        # formats of tensors are chosen by `pack`, not guessed by the ops that make them
        npu.config.allow_internal_format = True

    def make_graphs(self) -> GraphBackend:
        from headrace.platforms.npu.graphs import NpuGraphs

        return NpuGraphs(self.device, self.captures)


def register() -> None:
    """Make `torch.npu` and the `npu` ops known. RuntimeError with the versions when torch_npu cannot be imported."""
    try:
        import torch_npu  # noqa: F401  (its import registers both)
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"torch_npu cannot be imported ({error}): set CANN's environment ({versions.SOURCE}) and see in headrace "
            "doctor whether its version is the one that torch_npu needs"
        ) from error
