"""The real package: it imports, registers the ops that the platform calls as the platform calls them, and has the
names of the runtime that the platform uses. The simulations of the other tests are held to it here."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from headrace.platforms.npu import versions
from headrace.platforms.npu.platform import NpuPlatform
from headrace.platforms.registry import unmet
from tests.engine.tiny_models import make_tiny
from tests.platforms.npu import kernels
from tests.platforms.npu.schemas import SCHEMAS
from tests.platforms.npu.simulated import SimulatedNpu

# The only one that the package gives no shapes for: another order in memory keeps the shape.
WITHOUT_META = {
    "npu_format_cast",
    "npu_fused_infer_attention_score.out",
    "_npu_fused_infer_attention_score_get_max_workspace",
}


def test_it_is_the_package_of_this_torch():
    import torch_npu

    assert torch_npu.__version__.startswith(metadata.version("torch").partition("+")[0])
    found = {"torch": metadata.version("torch"), "torch-npu": metadata.version("torch-npu")}
    problems = versions.problems({**found, "CANN": "9.1.0", "driver": "25.5.0"})
    assert not [problem for problem in problems if problem.level == "error"]
    for row in NpuPlatform().implementations():
        for need in row.requires:
            assert unmet(need, lambda name: metadata.version(name)) is None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_schemas(schema):
    packet, _, overload = schema.partition("(")[0].partition(".")
    op = getattr(getattr(torch.ops.npu, packet), overload or "default")
    assert str(op._schema) == f"npu::{schema}"


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_shapes_are_the_packages(name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")
    assert has == (name not in WITHOUT_META)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "PrivateUse1")


@pytest.mark.parametrize(
    "name", [name for name in vars(SimulatedNpu) if not name.startswith("_") and name != "log"]
)
def test_the_simulated_module_has_only_what_the_real_one_has(name):
    if name in ("running", "capturing"):
        return  # the simulation's own
    assert hasattr(torch.npu, name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("graph_task_group_begin", ["stream"]),
        ("graph_task_group_end", ["stream"]),
        ("graph_task_update_begin", ["stream", "handle"]),
        ("graph_task_update_end", ["stream"]),
        ("graph_pool_handle", []),
    ],
)
def test_functions_of_graphs(name, arguments):
    assert list(inspect.signature(getattr(torch.npu, name)).parameters) == arguments


def test_classes_of_graphs():
    begin = inspect.signature(torch.npu.NPUGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begin)
    for cls, methods in (
        (torch.npu.NPUGraph, ("capture_begin", "capture_end", "replay", "reset")),
        (torch.npu.ExternalEvent, ("wait", "reset", "record")),
        (torch.npu.Event, ("record", "synchronize", "query")),
        (torch.npu.Stream, ("synchronize",)),
    ):
        for method in methods:
            assert callable(getattr(cls, method))


def test_what_the_runtime_sets():
    import torch_npu

    assert list(inspect.signature(torch.npu.set_compile_mode).parameters) == ["jit_compile"]
    assert callable(torch_npu._C._weak_ref_tensor)
    assert torch.get_device_module("npu") is torch.npu
    assert "hccl" in torch.distributed.Backend.backend_list


def without_cann(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where torch_npu is installed and CANN's libraries are not to be found."""
    here = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run([sys.executable, *command], env=here, capture_output=True, text=True)


def test_without_cann_torch_itself_cannot_be_imported():
    """Why child processes are told not to import vendors' packages."""
    assert "torch_npu" in without_cann("-c", "import torch").stderr


def test_without_cann_other_devices_still_serve(tmp_path):
    make_tiny("llama", tmp_path)
    script = (
        "from headrace.cli.conformance.local_engine import LocalEngine, greedy\n"
        "from headrace.platforms.cpu.platform import CpuPlatform\n"
        f"with LocalEngine({str(tmp_path)!r}, CpuPlatform.probe()[0], worker='process') as engine:\n"
        "    print('tokens', engine.run([[5, 6, 7]], greedy(3))[0].tokens)\n"
    )
    done = without_cann("-c", script)
    assert "tokens [" in done.stdout, done.stderr[-2000:]


def test_without_cann_the_device_says_what_to_do():
    script = (
        "from headrace.platforms.npu.platform import NpuPlatform\n"
        "NpuPlatform().open(NpuPlatform.describe('910B'))\n"
    )
    here = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    here.pop("LD_LIBRARY_PATH")
    done = subprocess.run([sys.executable, "-c", script], env=here, capture_output=True, text=True)
    assert "set_env.sh" in done.stderr.strip().splitlines()[-1]


def test_without_a_device_the_runtime_says_so():
    """The stub libraries find no device: opening one fails with words, not with a crash."""
    assert torch.npu.device_count() == 0
    with pytest.raises(Exception, match=r"\w"):
        NpuPlatform().open(NpuPlatform.describe("910B"))
