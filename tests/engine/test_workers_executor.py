"""Executors over a tiny model: phases, overlap, failures that must not spread, and deaths that must not be silent."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine.core.executor import WorkerFailed
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import SCHEMA_VERSION, NewRow, StepPlan, StepResult
from headrace.engine.models.spec import ModelSpec, RopeSpec
from headrace.engine.weights.source import ModelFiles
from headrace.engine.workers import executor as executor_module
from headrace.engine.workers.executor import CallFailed
from headrace.engine.workers.messages import (
    Call,
    Hello,
    Reply,
    Setup,
    pack,
    unpack_for_worker,
    unpack_from_worker,
)
from headrace.platforms.device import DeviceInfo
from tests.engine.driver import LocalEngine, config_for, greedy
from tests.engine.tiny_models import make_tiny, prompt

KINDS = ("inproc", "process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_tiny("llama", path)
    return path


def empty_plan(step_id: int, rows: int = 1, **changes: Any) -> StepPlan:
    """A dummy step of the row that belongs to nobody in an engine of 16 rows."""
    fields: dict[str, Any] = {
        "rows": np.full(rows, 16, np.int32),
        "num_computed": np.zeros(rows, np.int32),
        "num_new": np.ones(rows, np.int32),
        "sample": np.ones(rows, np.bool_),
        "num_decode": rows,
        "new_rows": [],
        "block_updates": np.zeros((0, 4), np.int32),
        **changes,
    }
    return StepPlan(step_id=step_id, **fields)


# Messages


def test_setup_survives_the_wire(tmp_path: Path) -> None:
    spec = ModelSpec(
        "llama", 2, 8, 16, 2, 1, 4, 99, 64, 1e-5, windows=(0, 16), ropes=(RopeSpec(factors=(1.0,)),)
    )
    device = DeviceInfo("x", 3, "X", "y", frozenset({"a"}), 7, 2, ("float32",), {"d": "1"}, ("n",))
    setup = Setup(
        config=config_for("m", force={"linear": "reference"}),
        files=ModelFiles("m", "dummy", str(tmp_path), ("a", "b")),
        spec=spec,
        device=device,
        rank=1,
        world=2,
    )
    assert unpack_for_worker(pack(setup)) == setup


def test_steps_and_messages_are_told_apart() -> None:
    row = NewRow(0, "r", b"\1\0\0\0", 1, SamplingParams(logit_bias={3: 1.0}))
    plan = unpack_for_worker(pack(empty_plan(5, new_rows=[row])))
    assert isinstance(plan, StepPlan) and plan.step_id == 5 and plan.new_rows == [row]
    call = Call(1, "profile", ["start", ""])
    assert unpack_for_worker(pack(call)) == call
    result = StepResult(5, np.array([7], np.int32), {}, {}, [])
    answer = unpack_from_worker(pack(result))
    assert isinstance(answer, StepResult) and answer.token_ids.tolist() == [7]
    assert unpack_from_worker(pack(Hello(SCHEMA_VERSION, 1))) == Hello(SCHEMA_VERSION, 1)


# Life


@pytest.mark.parametrize("worker", KINDS)
def test_phases_answers_and_utilities(folder: Path, worker: str) -> None:
    with LocalEngine(folder, worker=worker) as engine:
        assert engine.phases == ["open", "load", "measure", "kv", "warm-up"]
        info = engine.info
        assert (info.device, info.dtype, info.vocab) == ("cpu:0", "float32", 99)
        assert len(info.kv_specs) == len(info.kv_formats) == 3
        assert info.weight_bytes > 0 and info.free_memory > 0 and info.activation_bytes > 0
        assert {row["op"] for row in info.selection} >= {"linear", "paged_attention", "sample"}
        assert engine.executor.call("selection") == info.selection
        with pytest.raises(CallFailed, match="no profile is being taken"):
            engine.executor.call("profile", "stop")
        with pytest.raises(CallFailed, match="no call 'launch'"):
            engine.executor.call("launch")
        first = engine.run([prompt(9)], greedy(5))
        engine.executor.call("reset")
        assert engine.run([prompt(9)], greedy(5))[0].tokens == first[0].tokens


def test_profile_names_the_costly_ops_and_writes_a_trace(folder: Path, tmp_path: Path) -> None:
    with LocalEngine(folder) as engine:
        engine.executor.call("profile", "start")
        engine.run([prompt(5)], greedy(3))
        trace = tmp_path / "trace.json"
        assert "aten::" in engine.executor.call("profile", "stop", str(trace))
        assert trace.stat().st_size > 0


@pytest.mark.parametrize("worker", KINDS)
def test_fileno_wakes_for_every_result(folder: Path, worker: str) -> None:
    """Results that came while a call waited for its answer are not slept through."""
    with LocalEngine(folder, worker=worker) as engine:
        executor = engine.executor
        for step in (1, 2):
            executor.submit(empty_plan(step))
        executor.call("selection")
        for step in (1, 2):
            assert select.select([executor.fileno()], [], [], 30.0)[0]
            result = executor.poll(0.0)
            assert result is not None and result.step_id == step
        assert executor.poll(0.0) is None


@pytest.mark.parametrize("worker", KINDS)
def test_nothing_is_left_behind(folder: Path, worker: str) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with LocalEngine(folder, worker=worker):
        pass
    before = held()
    with LocalEngine(folder, worker=worker) as engine:
        engine.run([prompt(3)], greedy(2))
    assert held() == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] for pid in children]
    assert "Z" not in states


# Failures


@pytest.mark.parametrize("worker", KINDS)
def test_a_failed_step_harms_no_other(folder: Path, worker: str) -> None:
    with LocalEngine(folder, worker=worker) as engine:
        want = engine.run([prompt(9)], greedy(5))[0].tokens
        engine.executor.submit(empty_plan(1, rows=2, num_new=np.array([1, -3], np.int32)))
        engine.executor.submit(empty_plan(2))
        broken, good = engine.executor.poll(30.0), engine.executor.poll(30.0)
        assert broken is not None and broken.step_id == 1 and not broken.retry
        assert "\n" not in broken.error and broken.error
        assert broken.token_ids.tolist() == [-1, -1]
        assert good is not None and good.step_id == 2 and not good.error
        assert engine.run([prompt(9)], greedy(5))[0].tokens == want


def test_out_of_memory_is_worth_another_try(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.runner.runner import Runner

    with LocalEngine(folder) as engine:
        text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes. (Cannot allocate memory)"

        def launch(self: Runner, plan: StepPlan) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(Runner, "launch", launch)
        engine.executor.submit(empty_plan(1))
        result = engine.executor.poll(30.0)
        assert result is not None and result.retry and "out of memory" in result.error


@pytest.mark.parametrize("worker", KINDS)
def test_a_phase_that_fails_says_why(folder: Path, worker: str) -> None:
    engine = LocalEngine(folder, worker=worker, force={"paged_attention": "nonesuch"})
    with pytest.raises(WorkerFailed, match="'nonesuch' was asked for but does not exist"):
        engine.__enter__()


def pids_of(engine: LocalEngine) -> list[int]:
    return [link._process.pid for link in engine.executor._links]  # type: ignore[attr-defined]


def test_a_killed_worker_is_named_with_its_signal(folder: Path) -> None:
    with LocalEngine(folder, worker="process") as engine:
        (pid,) = pids_of(engine)
        os.kill(pid, signal.SIGKILL)
        assert select.select([engine.executor.fileno()], [], [], 30.0)[0]
        with pytest.raises(WorkerFailed, match=rf"worker 0 died: pid {pid} was killed by SIGKILL"):
            engine.executor.poll(0.0)
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            engine.executor.submit(empty_plan(1))


def test_a_worker_that_crashes_gives_its_last_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    (folder / "python").write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
    (folder / "python").chmod(0o755)
    engine = LocalEngine(folder, worker="process")
    with pytest.raises(WorkerFailed, match="ended with exit code 3; its last lines: no such luck"):
        engine.__enter__()


def test_signals_of_the_terminal_do_not_end_a_worker(folder: Path) -> None:
    with LocalEngine(folder, worker="process") as engine:
        (pid,) = pids_of(engine)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert len(engine.run([prompt(3)], greedy(3))[0].tokens) == 3


def test_a_hung_worker_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(folder, worker="process") as engine:
        (pid,) = pids_of(engine)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(executor_module, "CALL_STALL_S", 0.3)
        with pytest.raises(WorkerFailed, match=r"worker 0 said nothing for 0 s in 'selection'"):
            engine.executor.call("selection")
        assert not Path(f"/proc/{pid}").exists()


def test_a_hung_step_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(folder, worker="process") as engine:
        (pid,) = pids_of(engine)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(executor_module, "STEP_STALL_S", 0.3)
        engine.executor.submit(empty_plan(1))
        deadline = time.monotonic() + 30
        with pytest.raises(WorkerFailed, match="no worker answered a step"):
            while time.monotonic() < deadline:
                engine.executor.poll(0.1)


_PARENT = """
import sys, time
from tests.engine.driver import LocalEngine
engine = LocalEngine(sys.argv[1], worker="process").__enter__()
print(engine.executor._links[0]._process.pid, flush=True)
time.sleep(600)
"""


def test_workers_end_with_their_parent(folder: Path) -> None:
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
        if state == "Z":  # ended, and not yet collected by whoever adopts orphans here
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_inproc_holds_one_rank(folder: Path) -> None:
    with pytest.raises(ValueError, match="--worker inproc holds one rank"):
        LocalEngine(folder, worker="inproc", tensor_parallel_size=2)


def test_executors_need_no_torch(folder: Path) -> None:
    """The engine process imports torch in its worker thread only, and not at all with worker processes."""
    code = (
        "import sys; import headrace.engine.workers.start; "
        "sys.exit('torch' in sys.modules or 'numpy' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_reply_is_plain_data() -> None:
    reply = Reply(1, {"a": [1, 2.5, None, "x"]})
    assert unpack_from_worker(pack(reply)) == reply
