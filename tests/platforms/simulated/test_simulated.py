"""The engine end to end on a device that is neither the CPU nor any vendor's: no device is named in shared code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_server import HEADRACE
from tests.fake_platform.plugin import install, on_path

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with on_path(install(HERE, tmp_path_factory.mktemp("simulated"))) as folder:
        yield folder


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize(("family", "ranks"), [("gemma3, windows", 1), ("llama", 2)])
def test_answers_are_the_cpu_s(tmp_path, family, ranks):
    """In a thread of the process with captured decodes, and in two worker processes."""
    done = python(str(HERE / "whole_engine.py"), str(tmp_path), family, str(ranks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_runtime_conforms(tmp_path):
    areas = ("memory", "graphs", "collectives", "rms_norm")
    only = [word for area in areas for word in ("--op", area)]
    command = [*HEADRACE, "conformance", "--device", "sim", *only]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# What the device and the guard are for, each seen to fail.
MISTAKES = {
    "a device is named": (
        "exec(compile('torch.cuda.is_available()', '', 'exec'), {'__name__': 'headrace.x', 'torch': torch})",
        "headrace.x touches torch.cuda.is_available",
    ),
    "a device that torch does not know is named": (
        "exec(compile('torch.npu.Stream()', '', 'exec'), {'__name__': 'headrace.x', 'torch': torch})",
        "headrace.x touches torch.npu.Stream",
    ),
    "a tensor was left on the host": ("x + torch.ones(4)", "tensors on the device and on the host"),
    "nobody waited for a copy": (
        "h = runtime.pinned_empty((4,), torch.int64)\n"
        "h.copy_(x.long(), non_blocking=True)\n"
        "assert h.tolist() == [0, 1, 2, 3], h.tolist()",
        "[77, 77, 77, 77]",
    ),
    "pinned memory was used again too early": (
        "h = torch.ones(4)\nx.copy_(h, non_blocking=True)\nh.zero_()\nruntime.synchronize()",
        "rewritten before the device had read it",
    ),
    "a capture waits": (
        "with runtime.graphs().session():\n"
        "    runtime.graphs().capture(None, lambda: x.sum().item(), None)",
        "which a capture forbids",
    ),
    "a captured result is used without a replay": (
        "out = []\n"
        "with runtime.graphs().session():\n"
        "    graph = runtime.graphs().capture(None, lambda: out.append(x + 1), None)\n"
        "graph.replay(None)\n"
        "assert out[0].tolist() == [1, 2, 3, 4]\n"
        "with runtime.graphs().session():\n"
        "    runtime.graphs().capture(None, lambda: out.append(x + 1), None)\n"
        "assert out[1].tolist() == [1, 2, 3, 4], out[1].tolist()",
        "[nan, nan, nan, nan]",
    ),
    "a stream of another device": ("with runtime.use_stream(None): pass", "is no stream"),
}


def test_mistakes_are_noticed(tmp_path):
    script = [
        "import traceback",
        "import torch",
        "from headrace.platforms.probe import load_platform",
        "platform = load_platform('sim')",
        "runtime = platform.open(platform.probe()[0])",
        "assert isinstance(torch.cuda.is_available(), bool)  # others may ask",
        f"for name, (body, said) in {MISTAKES!r}.items():",
        "    x = torch.arange(4.0).to(runtime.device)",
        "    try:",
        "        exec(body)",
        "    except Exception:",
        "        assert said in traceback.format_exc(), (name, traceback.format_exc())",
        "    else:",
        "        raise SystemExit(f'not noticed: {name}')",
    ]
    (tmp_path / "script.py").write_text("\n".join(script))
    done = python("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_blocks_are_unpacked_there(tmp_path):
    """Copies arrive late: a pinned piece that is rewritten too early, or read on the host, is an error."""
    script = [
        "import sys, torch",
        "from pathlib import Path",
        "from headrace.platforms.probe import load_platform",
        "platform = load_platform('sim')",
        "runtime = platform.open(platform.probe()[0])",
        f"sys.path.insert(0, {str(HERE.parents[2])!r})",
        "from tests.unit.test_weights_upload import PARTS, stored",
        "from headrace.engine.weights.upload import Uploader",
        "upload = Uploader(runtime, piece=4096, pieces=2)",
        "for name in ('F32', 'BF16', 'Q4_0', 'Q8_0', 'Q4_K', 'Q6_K'):",
        "    handle = stored(Path('.'), name, upload)",
        "    for rows, cols in PARTS:",
        "        want = handle.read(torch.bfloat16, rows, cols)",
        "        out = torch.empty(want.shape, dtype=want.dtype, device=runtime.device)",
        "        handle.read_into(out, rows, cols)",
        "        runtime.synchronize()",
        "        assert torch.equal(out.cpu(), want), (name, rows, cols)",
        "upload.close()",
    ]
    (tmp_path / "script.py").write_text("\n".join(script))
    done = python("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
