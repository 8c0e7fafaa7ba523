"""Silence counts as the peer's only while this process could listen."""

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st

from router.live.silence import SilenceClock, SilenceWatch
from tests.unit.router.test_driver import FakeWorker, submit, with_workers


def test_real_silence_is_noticed_in_time():
    quiet = SilenceClock(3.0, tick_s=0.25, now_s=0.0)
    assert [quiet.look(i * 0.25) for i in range(1, 13)] == [False] * 11 + [True]


def test_hearing_something_begins_anew():
    quiet = SilenceClock(1.0, tick_s=0.25, now_s=0.0)
    assert not any(quiet.look(i * 0.25) for i in range(1, 4))
    quiet.observe()
    assert not any(quiet.look(i * 0.25) for i in range(4, 7))
    assert quiet.look(1.75)


@given(st.lists(st.floats(0.0, 100.0), max_size=40))
def test_no_stall_of_our_own_is_silence(stalls_s):
    """However long we stood still, a peer that speaks between any two of our checks is never silent."""
    quiet, now_s = SilenceClock(1.0, tick_s=0.125, now_s=0.0), 0.0
    for stall_s in stalls_s:
        now_s += stall_s
        assert not quiet.look(now_s)
        now_s += 0.125
        assert not quiet.look(now_s)
        quiet.observe()


async def test_a_worker_is_not_lost_reason_we_were_held_up():
    worker = FakeWorker(reply=[10])
    worker.gate.clear()
    async with with_workers(worker, silence_s=0.4) as (driver, _):
        sink = submit(driver, max_tokens=1)
        await worker.until(lambda: worker.started)
        link = worker.link
        threading.Event().wait(1.0)  # Nothing runs in this loop meanwhile.
        for _ in range(10):
            await asyncio.sleep(0)  # Overdue callbacks run now.
        assert worker.link is link
        worker.gate.set()
        await asyncio.wait_for(sink.ended.wait(), 20)
        assert (sink.tokens, len(worker.started)) == ([10], 1)


async def test_silence_is_told_once_and_not_after_the_end():
    told = []
    with SilenceWatch(0.0, lambda: told.append("ended")):
        pass
    silent = asyncio.Event()
    with SilenceWatch(0.01, lambda: (told.append("silent"), silent.set())):
        await asyncio.wait_for(silent.wait(), 20)
    assert told == ["silent"]
