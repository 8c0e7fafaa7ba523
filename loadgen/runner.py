"""Open loop: every request is sent at its planned instant, whatever became of earlier ones.

A closed loop waits for answers and so hides how long a queue has become ("coordinated omission"). Therefore
the planned instant is the origin of all latencies, our own lateness is measured and reported, and nothing
here waits for room: a request that finds no connection left fails at once.

With `wait_for_turns` the turns of one conversation do wait, because a user reads an answer before asking on.
Such a turn is planned for its instant in the trace or for the end of the earlier turn plus think time,
whichever is later. Conversations stay independent of each other. A turn follows a failed one as it follows a
successful one, so that a server cannot lower its load by failing.

The clock is CLOCK_MONOTONIC (`time.monotonic`), the same for all processes of a machine.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from loadgen.lengths import PlannedRequest
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord

START_AFTER_S = 0.1
"""Seconds from the call to instant 0 of the plan, which leave time to make the first request."""

AHEAD_BYTES_MAX = 64 * 2**20
"""Maximum bytes of requests that are made before their instants."""
AHEAD_SPARE_S = 0.01
"""Another request is made ahead only while the next instant is at least this far off."""

MakeMessage = Callable[[PlannedRequest], bytes]
Send = Callable[[bytes, RequestRecord], Awaitable[None]]
"""A sender fills the record's outcome and raises nothing but cancellation."""


@dataclass(frozen=True, slots=True)
class ReplayObserver:
    """Is called for every request when it is sent and when it ends."""

    on_sent: Callable[[RequestRecord], None]
    on_ended: Callable[[RequestRecord], None]
    wants_stop: Callable[[], bool] = lambda: False
    """Is asked a few times per second whether the run can stop."""


async def replay_plan(
    requests: Sequence[PlannedRequest],
    make_message: MakeMessage,
    send: Send,
    *,
    connections_max: int,
    observer: ReplayObserver,
    stop: asyncio.Event,
    wait_for_turns: bool = False,
    origin_s: float | None = None,
) -> list[RequestRecord]:
    """Records of all requests whose instant came before `stop` was set, in the order in which they were sent;
    each has an outcome.

    `stop` cancels running requests. Requests that were not sent are not in the list. `origin_s` is instant 0
    of the plan on the monotonic clock; None means soon.
    """
    run = _Run(requests, make_message, send, connections_max, observer, wait_for_turns)
    run.origin_s = time.monotonic() + START_AFTER_S if origin_s is None else origin_s
    await run.dispatch(stop)
    await _drain(run.running, stop)
    for record in run.records:
        if record.outcome is None:  # cancelled before its task ran
            record.outcome, record.error = RequestOutcome.FAILED, ErrorKind.INTERRUPTED
            record.ended_s = time.monotonic()
            observer.on_ended(record)
    return run.records


class _Run:
    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        make_message: MakeMessage,
        send: Send,
        connections_max: int,
        observer: ReplayObserver,
        wait_for_turns: bool,
    ) -> None:
        self.origin_s = 0.0
        self.records: list[RequestRecord] = []
        self.running: set[asyncio.Task[None]] = set()
        self._send = send
        self._connections_max = connections_max
        self._observer = observer
        here = {r.index for r in requests}
        self._later: dict[int, list[PlannedRequest]] = {}
        """Waiting turns by the index of the turn that they wait for."""
        first: list[PlannedRequest] = []
        for request in requests:
            if wait_for_turns and request.parent is not None and request.parent in here:
                self._later.setdefault(request.parent, []).append(request)
            else:
                first.append(request)
        self._due: list[tuple[float, int, PlannedRequest]] = [(r.at_s, r.index, r) for r in first]
        """A heap of instants since the origin."""
        heapify(self._due)
        self._ahead = _Ahead((r for _, _, r in sorted(self._due)), make_message)
        self._news = asyncio.Event()

    async def dispatch(self, stop: asyncio.Event) -> None:
        """Returns when every request has been sent, or `stop` is set."""
        watch = asyncio.ensure_future(stop.wait())
        watch.add_done_callback(lambda _: self._news.set())
        try:
            while (self._due or self._later) and not stop.is_set():
                if await self._until_next():
                    at_s, _, request = heappop(self._due)
                    self._leave(request, at_s)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _until_next(self) -> bool:
        """True when the next request is due; False if something else must be checked first."""
        wait_s = self.origin_s + self._due[0][0] - time.monotonic() if self._due else None
        if wait_s is not None and wait_s <= 0:
            await asyncio.sleep(0)  # behind schedule, but answers still have to be read
            return not self._took_news()
        if (wait_s is None or wait_s > AHEAD_SPARE_S) and self._ahead.make_one():
            await asyncio.sleep(0)
            return False
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return False  # timers may fire early, so the time is checked again
        return not self._took_news()

    def _took_news(self) -> bool:
        """An earlier turn may have made one due, or the run must stop."""
        had = self._news.is_set()
        self._news.clear()
        return had

    def _leave(self, request: PlannedRequest, at_s: float) -> None:
        record = RequestRecord(
            request.index,
            planned_s=self.origin_s + at_s,
            slo_class=request.slo_class,
            tenant=request.tenant,
            session=request.session,
            turn=request.turn,
            asked_tokens=request.output_tokens,
            trace_instant_s=self.origin_s + request.at_s if at_s > request.at_s else None,
        )
        self.records.append(record)
        self._observer.on_sent(record)
        if len(self.running) >= self._connections_max:
            _refuse_to_send(record, now_s=time.monotonic())
            self._ended(record)
            return
        message = self._ahead.take(request)
        task = asyncio.get_running_loop().create_task(self._one(message, record))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _one(self, message: bytes, record: RequestRecord) -> None:
        try:
            await self._send(message, record)
        finally:
            if record.outcome is not None:
                self._ended(record)

    def _ended(self, record: RequestRecord) -> None:
        self._observer.on_ended(record)
        ended_s = (time.monotonic() if record.ended_s is None else record.ended_s) - self.origin_s
        for turn in self._later.pop(record.index, ()):
            heappush(self._due, (max(turn.at_s, ended_s + turn.think_s), turn.index, turn))
            self._news.set()


class _Ahead:
    """Messages that are made before their instants, while there is time and room."""

    def __init__(self, requests: Iterable[PlannedRequest], make_message: MakeMessage) -> None:
        self._coming = deque(requests)
        self._make = make_message
        self._made: dict[int, bytes] = {}
        self._bytes = 0

    def make_one(self) -> bool:
        """False if no message is left to make, or there is no room."""
        if not self._coming or self._bytes >= AHEAD_BYTES_MAX:
            return False
        request = self._coming.popleft()
        message = self._made[request.index] = self._make(request)
        self._bytes += len(message)
        return True

    def take(self, request: PlannedRequest) -> bytes:
        message = self._made.pop(request.index, None)
        if message is not None:
            self._bytes -= len(message)
            return message
        if self._coming and self._coming[0].index == request.index:
            self._coming.popleft()
        return self._make(request)


async def _drain(running: set[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait until all have ended (each has its own timeout), or until `stop` cancels them."""
    left = list(running)
    if not left:
        return
    stopped = asyncio.ensure_future(stop.wait())
    ended = asyncio.ensure_future(asyncio.wait(left))
    try:
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        for task in left:
            task.cancel()
        await asyncio.gather(stopped, ended, *left, return_exceptions=True)


def _refuse_to_send(record: RequestRecord, *, now_s: float) -> None:
    record.outcome, record.error = RequestOutcome.FAILED, ErrorKind.CONNECTION_LIMIT
    record.detail = "all connections were in use"
    record.ended_s = now_s
