"""Open loop: every request leaves at its planned instant, whatever became of the ones before.

A closed loop waits for answers and so hides how long a queue has become ("coordinated omission"). Hence the
planned instant is the origin of all latencies, our own lateness is measured and reported, and nothing here
waits for room: a request that finds no connection left fails at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadgen.lengths import PlannedRequest
from loadgen.records import ErrorKind, Outcome, Record

START_AFTER_S = 0.1
"""From the call to instant 0 of the plan: room to make the first request."""

MakeMessage = Callable[[PlannedRequest], bytes]
Send = Callable[[bytes, Record], Awaitable[None]]
"""Must fill the record's outcome and raise nothing but cancellation."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Hears of every request when it leaves and when it ends."""

    on_sent: Callable[[Record], None]
    on_ended: Callable[[Record], None]


async def replay_plan(
    requests: Sequence[PlannedRequest],
    make_message: MakeMessage,
    send: Send,
    *,
    connections_max: int,
    observer: Observer,
    stop: asyncio.Event,
) -> list[Record]:
    """Records of all requests whose instant came before `stop` was set; each has an outcome.

    `stop` cancels what runs; requests that have not left are not in the list.
    """
    loop = asyncio.get_running_loop()
    origin_s = loop.time() + START_AFTER_S
    records: list[Record] = []
    running: set[asyncio.Task[None]] = set()

    async def one(message: bytes, record: Record) -> None:
        try:
            await send(message, record)
        finally:
            observer.on_ended(record)

    def gone(task: asyncio.Task[None]) -> None:
        running.discard(task)

    for request in requests:
        # Made before its instant: the next one is prepared while we would sleep anyway.
        message = make_message(request)
        if await _wait_until(origin_s + request.at_s, stop):
            break
        record = Record(request.index, planned_s=origin_s + request.at_s)
        records.append(record)
        observer.on_sent(record)
        if len(running) >= connections_max:
            _refuse_to_send(record, now_s=loop.time())
            observer.on_ended(record)
            continue
        task = loop.create_task(one(message, record))
        running.add(task)
        task.add_done_callback(gone)
    await _drain(running, stop)
    for record in records:
        if record.outcome is None:  # cancelled before its task ran
            record.outcome, record.error = Outcome.FAILED, ErrorKind.INTERRUPTED
            record.ended_s = loop.time()
    return records


async def _wait_until(instant_s: float, stop: asyncio.Event) -> bool:
    """True when `stop` was set first."""
    wait_s = instant_s - asyncio.get_running_loop().time()
    if wait_s <= 0:
        await asyncio.sleep(0)  # behind schedule: still let answers be read
        return stop.is_set()
    try:
        async with asyncio.timeout(wait_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True


async def _drain(running: set[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Until all have ended (each has its own timeout), or `stop`, which cancels them."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while running and not stopped.done():
            await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        left = list(running)
        for task in left:
            task.cancel()
        await asyncio.gather(stopped, *left, return_exceptions=True)


def _refuse_to_send(record: Record, *, now_s: float) -> None:
    record.outcome, record.error = Outcome.FAILED, ErrorKind.CONNECTION_LIMIT
    record.detail = "all connections were in use"
    record.ended_s = now_s
