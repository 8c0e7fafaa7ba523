"""Streams are written together: at once while there is time, later while there is none."""

import asyncio

import pytest

from router.live.flusher import SHARE, SLICE_S, WAIT_S_MAX, Flusher


class Clock:
    """A clock of the time that flushing takes."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


async def flushed(flusher, flush=lambda: None):
    """Return the time from being added to being called, on the clock of the loop."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    began_s = loop.time()

    def call():
        flush()
        done.set_result(loop.time() - began_s)

    flusher.add(call)
    assert not done.done()  # It is never called within `add`.
    async with asyncio.timeout(5):
        return await done


async def test_all_that_is_due_goes_in_one_round_and_once():
    flusher, seen = Flusher(), []
    for name in "abc":
        flusher.add(lambda name=name: seen.append(name))
    await flushed(flusher)
    assert seen == ["a", "b", "c"]
    await flushed(flusher)
    assert seen == ["a", "b", "c"]


async def test_the_next_round_waits_for_a_multiple_of_what_the_last_one_took():
    clock = Clock()
    flusher = Flusher(clock)

    def slowly():
        clock.now_s += 0.005

    await flushed(flusher, slowly)
    assert await flushed(flusher) >= 0.005 * SHARE - 0.002  # The clock of the loop is a little coarse.


async def test_no_token_waits_long():
    clock = Clock()
    flusher = Flusher(clock)

    def very_slowly():
        clock.now_s += 100.0

    await flushed(flusher, very_slowly)
    assert await flushed(flusher) >= WAIT_S_MAX - 0.002


async def test_what_is_added_while_others_are_written_goes_in_the_next_round():
    flusher, seen = Flusher(), []
    later = asyncio.Event()

    def again():
        seen.append("again")
        later.set()

    def first():
        seen.append("first")
        flusher.add(again)
        seen.append("added")

    flusher.add(first)
    async with asyncio.timeout(5):
        await later.wait()
    assert seen == ["first", "added", "again"]


async def test_a_long_round_lets_others_have_their_turn_and_ends_in_order():
    clock, seen = Clock(), []
    waiting = [3]

    def take_in():
        waiting[0] -= 1
        clock.now_s += SLICE_S
        seen.append("in")
        return waiting[0] >= 0

    def slowly(name):
        clock.now_s += 1.5 * SLICE_S
        seen.append(name)

    flusher = Flusher(clock, take_in)
    for name in "abc":
        flusher.add(lambda name=name: slowly(name))
    loop = asyncio.get_running_loop()
    while "c" not in seen:
        turn = asyncio.Event()
        loop.call_soon(turn.set)
        await turn.wait()
        seen.append(".")
    assert "".join(seen).replace(".", "").replace("in", "i") == "iiiiabc"
    assert seen.index(".") < seen.index("a"), "others had a turn before all was taken in"
    assert seen.count(".") >= 3, "and between the slices"


async def test_the_wait_is_spread_between_the_slices_of_a_round():
    """Work that needs several turns of the loop does not meet a slice at each; and a round of many slices
    pauses no longer than a token may wait."""
    clock, loop = Clock(), asyncio.get_running_loop()
    written_s, done = [], asyncio.Event()

    def slowly():
        clock.now_s += 1.5 * SLICE_S
        written_s.append(loop.time())
        if len(written_s) == 100:
            done.set()

    flusher = Flusher(clock)
    for _ in range(100):
        flusher.add(slowly)
    rested_s: list[float] = []
    plain = loop.call_later

    def call_later(delay_s, *rest):
        rested_s.append(delay_s)
        return plain(delay_s, *rest)

    loop.call_later = call_later
    try:
        async with asyncio.timeout(5):
            await done.wait()
    finally:
        del loop.call_later
    assert rested_s[0] == pytest.approx(1.5 * SLICE_S * SHARE)
    assert 2 < len(rested_s) < 100
    assert sum(rested_s) == pytest.approx(WAIT_S_MAX)


async def test_tokens_that_come_faster_than_they_are_taken_in_do_not_keep_streams_silent():
    clock, waiting, all_in = Clock(), [100], asyncio.Event()

    def take_in():
        clock.now_s += 2 * SLICE_S
        waiting[0] -= 1
        if not waiting[0]:
            all_in.set()
        return waiting[0] > 0

    await flushed(Flusher(clock, take_in))
    assert waiting[0] > 0, "written before all were in"
    async with asyncio.timeout(5):
        await all_in.wait()  # The others are called without being added again.


async def test_a_stream_that_fails_takes_no_other_with_it():
    flusher, seen = Flusher(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    error = RuntimeError("a defect")

    def fails():
        raise error

    flusher.add(fails)
    await flushed(flusher)
    await flushed(flusher)
    assert seen == [error]
