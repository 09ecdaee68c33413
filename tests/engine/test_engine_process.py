"""The engine process as its parent sees it: start, serve, fail, stop. All with the scripted executor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.engine.config.settings import CacheSettings, EngineConfig, SchedulerSettings
from headrace.engine.core.stop import STOP_SIGNAL
from headrace.engine.ipc.client import EngineDead
from headrace.engine.ipc.launch import start_engine
from headrace.engine.ipc.zmq_client import ZmqEngineClient
from tests.engine.engine_process import (
    DEVICE,
    collect,
    launch_scripted,
    scripted_config,
    scripted_engine,
    submit,
)
from tests.engine.scripted_executor import Script, expected_tokens

SLOW = Script(step_seconds=0.02)


async def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def idle_stats(client: ZmqEngineClient) -> dict:
    await until(lambda: client.stats.running == client.stats.waiting == 0)
    return await client.call("stats")


def test_ready_says_what_runs_and_requests_get_their_tokens():
    script = Script(windows=(0, 40), load_seconds=0.2)

    async def run():
        async with scripted_engine(script) as (client, _):
            assert client.state == "starting"
            ready = await client.wait_ready()
            assert client.state == "ready" and client.info is ready
            assert client.progress is not None
            assert (ready.max_model_len, ready.block_size, ready.max_num_seqs) == (512, 16, 32)
            assert ready.kv_tokens == 199 * 16 and ready.dtype == "float32"
            assert {"open", "load", "kv", "warm-up"} <= set(ready.phases)
            assert any("window of 40" in note for note in ready.notes)
            tokens, last = await collect(client, submit("a", [1, 2, 3], max_tokens=20))
            assert tokens == expected_tokens([1, 2, 3], 20, script)
            assert last.finish_reason == "length" and client.unfinished == 0

    asyncio.run(run())


def test_flood_with_random_aborts_loses_nothing_and_leaks_nothing():
    script = Script(windows=(0, 40), workers=1)
    config = scripted_config(script, CacheSettings(num_blocks=80))

    async def one(client: ZmqEngineClient, number: int) -> str:
        rng = random.Random(number)
        prompt = [rng.randrange(script.vocab) for _ in range(rng.randrange(1, 300))]
        count = rng.randrange(1, 40)
        leave = rng.randrange(1, 10) if rng.random() < 0.4 else 0
        tokens: list[int] = []
        outputs = client.generate(submit(str(number), prompt, max_tokens=count))
        if number % 10 == 9:  # gone before the first token
            task = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await task
            await outputs.aclose()
            return "cancelled"
        async for output in outputs:
            tokens += output.token_ids
            if leave and len(tokens) >= leave:
                await outputs.aclose()
                break
        shown = min(len(tokens), 8)
        assert tokens[:shown] == expected_tokens(prompt, shown, script)
        if leave and len(tokens) >= leave:
            return "left"
        assert output.finish_reason == "length" and len(tokens) == count
        return "finished"

    async def run():
        async with scripted_engine(script, config) as (client, process):
            await client.wait_ready()
            ends = await asyncio.gather(*(one(client, i) for i in range(500)))
            assert {"finished", "left", "cancelled"} == set(ends)
            assert client.unfinished == 0
            stats = await idle_stats(client)
            assert stats["kv_used_blocks"] == 0
            # the last aborts are behind us, and the engine still answers
            tokens, _ = await collect(client, submit("after", [5], max_tokens=3))
            assert tokens == expected_tokens([5], 3, script)
            assert process.exit_code is None

    asyncio.run(run())


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_closing_the_iterator_frees_everything_soon(when: str):
    """Case 95, engine part."""
    script = Script(step_seconds=0.02, seconds_per_token=0.0005)
    config = scripted_config(
        script, scheduler=SchedulerSettings(max_num_seqs=1, max_num_batched_tokens=16)
    )

    async def run():
        async with scripted_engine(script, config) as (client, _):
            await client.wait_ready()
            if when == "queued":
                first = client.generate(submit("first", [1], max_tokens=400))
                await anext(first)
            outputs = client.generate(submit("a", list(range(100)), max_tokens=400))
            task = asyncio.ensure_future(anext(outputs))
            if when == "decode":
                await task
                for _ in range(2):
                    await anext(outputs)
            else:
                await until(
                    lambda: client.stats.waiting if when == "queued" else client.stats.running
                )
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await outputs.aclose()
            if when == "queued":
                await first.aclose()
            assert client.unfinished == 0
            await until(lambda: client.stats.running == 0 and client.stats.kv_used_blocks == 0, 1.0)

    asyncio.run(run())


def test_abort_from_outside_ends_the_iterator():
    async def run():
        async with scripted_engine(SLOW) as (client, _):
            await client.wait_ready()
            task = asyncio.create_task(collect(client, submit("a", [1], max_tokens=400)))
            await until(lambda: client.stats.running == 1)
            client.abort(["a"])
            _, last = await task
            assert last.finish_reason == "abort"

    asyncio.run(run())


def test_refusals_come_back_as_outputs():
    async def run():
        async with scripted_engine(Script()) as (client, _):
            await client.wait_ready()
            tokens, last = await collect(client, submit("a", [1] * 600, max_tokens=5))
            assert tokens == [] and last.finish_reason == "error" and "512" in last.error

    asyncio.run(run())


def test_utility_calls_run_between_steps_and_their_errors_are_texts():
    script = Script(step_seconds=0.02, fail_call="profile")

    async def run():
        async with scripted_engine(script) as (client, _):
            await client.wait_ready()
            task = asyncio.create_task(collect(client, submit("a", [1], max_tokens=60)))
            await until(lambda: client.stats.running == 1)
            answer = await client.call("memory", unit="bytes")
            assert answer == {"method": "memory", "args": ["bytes"]}
            assert (await client.call("stats"))["running"] == 1
            assert await client.call("reset_prefix_cache") is True
            tokens, _ = await task
            assert tokens == expected_tokens([1], 60, script)
            with pytest.raises(RuntimeError, match="scripted failure of a call"):
                await client.call("profile")

    asyncio.run(run())


# ---- failures


def test_killed_engine_tells_everyone_at_once():
    async def run():
        async with scripted_engine(SLOW) as (client, process):
            await client.wait_ready()
            tasks = [
                asyncio.create_task(collect(client, submit(str(i), [i], max_tokens=400)))
                for i in range(40)
            ]
            call = asyncio.create_task(client.call("memory"))
            await until(lambda: client.stats.running > 0)
            process.kill()
            ends = await asyncio.wait_for(
                asyncio.gather(*tasks, call, return_exceptions=True), timeout=5
            )
            assert all(isinstance(end, EngineDead) for end in ends[:-1])
            assert "signal 9" in str(ends[0])
            assert client.state == "failed" and client.unfinished == 0
            with pytest.raises(EngineDead):
                await collect(client, submit("later", [1]))
            with pytest.raises(EngineDead):
                await client.call("stats")
            assert process.wait(5) == -signal.SIGKILL

    asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (Script(die_at_step=3), "worker 0 ended"),
        (Script(fail_load="no weights here"), "no weights here"),
        (Script(free_memory=10), "KV cache"),
        (Script(free_memory=4000), "--num-gpu-blocks-override: a KV cache of"),
    ],
)
def test_failures_reach_the_client_in_words_and_the_exit_code(script: Script, text: str):
    cache = CacheSettings(num_blocks=200 if script.free_memory > 10 else 0)

    async def run():
        async with scripted_engine(script, scripted_config(script, cache)) as (client, process):
            with pytest.raises(EngineDead, match=text):
                await client.wait_ready()
                await collect(client, submit("a", [1, 2], max_tokens=50))
            assert text in client.failure
            assert process.wait(10) == 1

    asyncio.run(run())


def test_an_engine_that_was_not_told_what_to_run_yet_is_stopped_at_once():
    waiting = start_engine(EngineConfig(), DEVICE, executor="nobody:needed")
    assert waiting.wait(0.5) is None
    # the signal that asks it to stop may end it first: it may not be listening yet
    assert waiting.stop(5) in (-signal.SIGKILL, -STOP_SIGNAL)


def test_failure_before_the_client_connects_is_still_told():
    async def run():
        process = launch_scripted(Script(fail_load="broken at once"))
        await asyncio.sleep(0.5)
        client = ZmqEngineClient(process.address, process)
        await client.start()
        with pytest.raises(EngineDead):
            await client.wait_ready()
        await client.close()
        assert process.wait(10) == 1

    asyncio.run(run())


def test_context_that_does_not_fit_is_said_with_the_way_out():
    config = scripted_config(Script(), CacheSettings(num_blocks=10), max_model_len=400)

    async def run():
        async with scripted_engine(Script(), config) as (client, _):
            with pytest.raises(EngineDead, match="lower --max-model-len to 144"):
                await client.wait_ready()

    asyncio.run(run())


# ---- the end


def test_stopping_is_orderly_and_answers_who_waits():
    async def run():
        async with scripted_engine(SLOW) as (client, process):
            await client.wait_ready()
            task = asyncio.create_task(collect(client, submit("a", [1], max_tokens=400)))
            await until(lambda: client.stats.running == 1)
            process.terminate()
            _, last = await asyncio.wait_for(task, 5)
            assert last.finish_reason == "abort"
            assert process.wait(10) == 0

    asyncio.run(run())


def test_stopping_while_loading_ends_at_once():
    process = launch_scripted(Script(load_seconds=60))
    time.sleep(1.0)
    process.terminate()
    assert process.wait(5) == 0


def test_what_these_signals_mean_the_parent_decides():
    """SIGINT comes from a terminal, SIGTERM from a service manager that sends it to every process."""

    async def run():
        async with scripted_engine(Script()) as (client, process):
            await client.wait_ready()
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
            tokens, _ = await collect(client, submit("a", [1], max_tokens=3))
            assert len(tokens) == 3

    asyncio.run(run())


def test_closing_the_client_stops_its_engine_and_leaves_no_workers():
    async def run():
        async with scripted_engine(Script(workers=2)) as (client, process):
            await client.wait_ready()
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 2
            await client.close()
            assert process.wait(10) == 0
            await until(lambda: not any(child.is_running() for child in children))

    asyncio.run(run())


PARENT = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from tests.engine.engine_process import launch_scripted
from tests.engine.scripted_executor import Script
process = launch_scripted(Script(workers=1, load_seconds=float(sys.argv[3])))
print(process.pid, process.address.removeprefix("ipc://"), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("load_seconds", ["0", "60"])
def test_engine_and_workers_end_with_a_killed_parent(load_seconds: str):
    """While it runs and while it loads."""
    here = Path(__file__).parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(here.parent.parent), str(here), load_seconds],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[0])
    engine = psutil.Process(pid)
    time.sleep(1.5)
    family = [engine, *engine.children(recursive=True)]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=8)
    parent.stdout.close()
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_socket_is_private_and_removed():
    async def run():
        async with scripted_engine(Script()) as (client, process):
            await client.wait_ready()
            folder = Path(process.address.removeprefix("ipc://")).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        return folder

    folder = asyncio.run(run())
    import gc

    deadline = time.monotonic() + 10
    while folder.exists():  # a thread that is about to end may hold it yet
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_idle_engine_uses_no_processor_time():
    """A count of its wake-ups, not a timing: blocked in one poll, it is hardly ever scheduled."""

    async def run():
        async with scripted_engine(Script()) as (client, process):
            await client.wait_ready()
            await collect(client, submit("a", [1], max_tokens=3))
            await asyncio.sleep(0.5)
            engine = psutil.Process(process.pid)
            before = engine.num_ctx_switches()
            await asyncio.sleep(1.0)
            after = engine.num_ctx_switches()
            assert sum(after) - sum(before) < 20

    asyncio.run(run())


def test_engine_process_imports_no_torch():
    code = (
        "import sys, headrace.engine.core.process, headrace.engine.ipc.zmq_client, "
        "headrace.engine.ipc.launch; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
