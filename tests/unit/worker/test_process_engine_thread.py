import asyncio
import threading

import pytest

from worker.engine_thread import EngineThread


async def test_calls_run_in_order_on_one_thread_and_errors_come_back():
    engine, ran = EngineThread(), []

    def call(number):
        ran.append((number, threading.get_ident()))
        if number == 3:
            raise ValueError("three")
        return number * 2

    results = await asyncio.gather(*(engine.run(call, n) for n in range(5)), return_exceptions=True)
    assert results[:3] == [0, 2, 4]
    assert str(results[3]) == "three"
    assert [number for number, _ in ran] == list(range(5))
    assert len({thread for _, thread in ran}) == 1
    assert ran[0][1] != threading.get_ident()
    assert await engine.close(timeout_s=5)


async def test_a_call_given_up_runs_to_its_end_before_the_next():
    engine, may_end, ended = EngineThread(), threading.Event(), []

    def slow():
        may_end.wait(5)
        ended.append("slow")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.run(slow), 0.01)
    assert not await engine.close(timeout_s=0.01)  # it hangs, and says so
    may_end.set()
    assert await engine.close(timeout_s=5)
    assert ended == ["slow"]
