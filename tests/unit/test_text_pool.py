"""The thread pool keeps the event loop free and bounded (cases 57 and 103)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.engine.text.pool import PoolBusy, TextPool


def test_runs_off_the_loop_and_passes_results_and_errors():
    async def main():
        pool = TextPool(threads=1)
        here = threading.get_ident()
        assert await pool.run(threading.get_ident) != here
        assert await pool.run(int, "ff", base=16) == 255
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        await asyncio.sleep(0)
        assert pool.pending == 0
        pool.close()

    asyncio.run(main())


def test_a_long_call_does_not_hold_the_others():
    async def main():
        pool, gate = TextPool(threads=2), threading.Event()
        slow = asyncio.ensure_future(pool.run(gate.wait, 30))
        assert await asyncio.wait_for(pool.run(len, "abc"), 10) == 3
        assert not slow.done()
        gate.set()
        assert await slow
        pool.close()

    asyncio.run(main())


def test_full_pool_refuses_at_once_and_recovers():
    async def main():
        pool, gate = TextPool(threads=1, max_pending=2), threading.Event()
        waiting = [asyncio.ensure_future(pool.run(gate.wait, 30)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(PoolBusy):
            await pool.run(len, "x")
        gate.set()
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.01)
        assert await pool.run(len, "x") == 1
        pool.close()

    asyncio.run(main())


def test_a_cancelled_caller_frees_its_place():
    async def main():
        pool, gate, ran = TextPool(threads=1, max_pending=2), threading.Event(), []
        first = asyncio.ensure_future(pool.run(gate.wait, 30))
        second = asyncio.ensure_future(pool.run(ran.append, 1))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await asyncio.sleep(0.01)
        assert pool.pending == 1  # it had not begun: it never runs
        gate.set()
        await first
        assert ran == []
        pool.close()

    asyncio.run(main())
