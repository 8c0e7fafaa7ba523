"""The driver of `RouterCore` on the event loop. It turns clients and workers into events of the core, and
performs the core's actions.

A defect in the core's decisions ends the router, on purpose: `run` raises it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from baton.core.demand import DemandReport
from baton.core.errors import NoCapacity
from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    RouterMessage,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StepOutput,
    WorkerHello,
    WorkerMessage,
)
from baton.core.steps import TokenLogprobs
from baton.wire.core_driver import CoreDriver, performer, performers
from baton.wire.crash import Crash
from baton.wire.link import LinkBroken
from router.decisions.core import RouterCore, RouterStatus
from router.decisions.events import (
    ClientGone,
    Deliver,
    Failed,
    FailureKind,
    Finished,
    FromWorker,
    LatencyBreakdown,
    Note,
    RouterAction,
    RouterEvent,
    Served,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from router.decisions.peer_loads import PeerBook
from router.decisions.prompt_hashes import ChainKind
from router.live.defects import INTERNAL, NOT_DEFECTS, report
from router.live.flusher import Flusher
from router.live.step_buffer import StepBuffer

log = logging.getLogger(__name__)

TAKEN_IN_AT_ONCE = 8
"""Number of sequences whose outputs are taken in at once, about a slice of a round (see
`router.live.flusher`)."""

CHAIN_KINDS_MAX = 2
"""Most kinds of block hashes that are computed early. There are two while workers are replaced by others; the
core computes any further kind when it needs it."""

Send = Callable[[RouterMessage], None]
"""A function that queues a message for a worker. Raises LinkBroken if it cannot be delivered."""


class Sink(Protocol):
    """The receiver of the tokens of one sequence. It must not wait, and may call the driver back."""

    def on_logprobs(
        self, logprobs: tuple[TokenLogprobs, ...], prompt_logprobs: tuple[TokenLogprobs, ...] | None
    ) -> None:
        """Receive the logprobs of the tokens that `on_tokens` brings next. It is called only if the request
        asked for them."""
        ...

    def on_tokens(self, tokens: tuple[int, ...], *, cached_token_count: int) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, failed: Failed) -> None: ...


class Connection:
    """An open session with one worker, as the driver sees it."""

    def __init__(self, hello: WorkerHello, address: str, send: Send, break_off: Callable[[], None]) -> None:
        self.worker_id: WorkerId = hello.worker_id
        self.hello, self.address = hello, address
        self.send, self.break_off = send, break_off


class Driver:
    def __init__(
        self,
        core: RouterCore,
        *,
        on_note: Callable[[Note], None] = lambda _: None,
        slice_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a driver within a running event loop, whose time is the core's.

        `slice_clock` tells the flusher how long its work took."""
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._steps = StepBuffer()
        self.flusher = Flusher(slice_clock, take_in=self._take_in)
        """Flusher of the streams to clients."""
        self._sinks: dict[SequenceId, Sink] = {}
        self._connections: dict[WorkerId, Connection] = {}
        self._crash = Crash()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.sequence_tokens_max: int | None = None
        """Most tokens of one sequence that the roomiest worker can hold, as far as is known; None: there was
        no worker yet."""
        self._chain_kinds: tuple[ChainKind, ...] = ()
        self._fingerprint = ""
        table = performers(
            RouterAction,
            performer(Deliver, self._deliver),
            performer(ToWorker, self._send),
            performer(Finished, self._finish),
            performer(Failed, self._fail),
            performer(Note, on_note),
        )
        driver: CoreDriver[RouterEvent, RouterAction] = CoreDriver(
            core, tick=Tick(), performers=table, crash=self._crash, clock=self._loop.time
        )
        self.feed = driver.post
        """Handle an event of the core, see `CoreDriver.post`."""

    @property
    def defect(self) -> BaseException | None:
        """The defect that ends this router; None: there was none."""
        return self._crash.error

    @property
    def in_flight_count(self) -> int:
        """Number of sequences whose client still waits for something."""
        return len(self._sinks)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the workers; empty: there was no worker yet."""
        return self._fingerprint

    @property
    def peers(self) -> PeerBook:
        return self._core.peers

    @property
    def chain_kinds(self) -> tuple[ChainKind, ...]:
        """Kinds of block hashes that a placement may ask for."""
        return self._chain_kinds

    def status(self) -> RouterStatus:
        return self._core.status()

    def demand(self, router_id: RouterId) -> DemandReport:
        return self._core.demand(router_id, now_s=self._loop.time())

    def now_s(self) -> float:
        """Return the time on the clock of deadlines."""
        return self._loop.time()

    async def run(self) -> None:
        """Wait until something goes wrong inside the core or a session, and raise it."""
        raise await self._crash.wait()

    def crash(self, error: BaseException) -> None:
        """End the router because of a defect outside the core: `run` raises the first one."""
        self._crash.report(error)

    # --- clients ----------------------------------------------------------------------------------

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Start a sequence. `sink` gets its end exactly once, maybe before this returns, unless `client_gone`
        is called. Raises NoCapacity while draining, and the defect that ends this router."""
        if self.is_draining:
            raise NoCapacity("this router is shutting down")
        self._sinks[submit.seq_id] = sink
        self._idle.clear()
        self.feed(submit)
        if self._crash.error is not None:  # This client would never get an answer.
            raise self._crash.error

    def client_gone(self, seq_id: SequenceId) -> bool:
        """Cancel a sequence. Its sink is not called any more. Return whether workers were computing it. An
        unknown sequence is ignored."""
        if self._forget(seq_id) is None:
            return False
        was_computing = self._core.is_computing(seq_id)
        self.feed(ClientGone(seq_id))
        return was_computing

    def answered(self, seq_id: SequenceId) -> None:
        """End a sequence whose client has all that it wants. It counts as one that ended well."""
        if self._forget(seq_id) is not None:
            self.feed(ClientGone(seq_id, is_answered=True))

    def progress_of(self, seq_id: SequenceId) -> tuple[LatencyBreakdown | None, Served | None]:
        """Return where the sequence's time went so far, and the workers that serve it."""
        return self._core.progress_of(seq_id)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more sequences and wait for those in flight. Returns whether they all ended in time."""
        self.is_draining = True
        return await self.idle(timeout_s)

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no sequence is in flight. Returns whether that came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, message: str) -> None:
        """End every sequence now with an error for its client."""
        for seq_id in list(self._sinks):
            if (sink := self._forget(seq_id)) is not None:
                self.feed(ClientGone(seq_id))
                sink.on_failed(Failed(seq_id, FailureKind.NO_CAPACITY, message))

    # --- workers ----------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> bool:
        """Add a session. Returns False if there is a session with this very worker already, which goes on."""
        if connection.worker_id in self._connections:
            return False
        self._connections[connection.worker_id] = connection
        self._update_facts()
        self.feed(WorkerJoined(connection.hello, connection.address))
        return True

    def disconnected(self, connection: Connection, reason: str) -> None:
        if self._connections.get(connection.worker_id) is connection:
            del self._connections[connection.worker_id]
            self._update_facts()
            self._feed_outputs(connection.worker_id, self._steps.take_worker(connection.worker_id))
            self.feed(WorkerLost(connection.worker_id, reason))

    def on_message(self, worker_id: WorkerId, message: WorkerMessage) -> None:
        """Handle a message of a worker. Tokens of running sequences wait for the next round, and everything
        else is handled now. Messages about one sequence are handled in their order."""
        match message:
            case StepOutput(outputs):
                self._feed_outputs(worker_id, self._steps.add(worker_id, outputs))
                if self._steps:
                    self.flusher.wake()
                return
            case SequenceJoined() | SequenceRefused() | SequenceFailed():
                self._feed_outputs(worker_id, self._steps.take_sequence(worker_id, message.seq_id))
            case BlockEvents():
                pass
            case _:
                self._feed_outputs(worker_id, self._steps.take_worker(worker_id))
        self.feed(FromWorker(worker_id, message))

    def _take_in(self) -> bool:
        taken = self._steps.take_some(TAKEN_IN_AT_ONCE)
        if taken is None:
            return False
        self._feed_outputs(*taken)
        return True

    def _feed_outputs(self, worker_id: WorkerId, outputs: tuple[SequenceOutput, ...]) -> None:
        if outputs:
            self.feed(FromWorker(worker_id, StepOutput(outputs)))

    def _update_facts(self) -> None:
        """Update the facts about workers. While there is no worker, the last facts hold, since workers come
        back."""
        hellos = [c.hello for c in self._connections.values()]
        if hellos:
            self.sequence_tokens_max = max(hello.max_model_tokens for hello in hellos)
            self._fingerprint = hellos[0].fingerprint
            kinds = Counter(ChainKind(hello.fingerprint, hello.block_tokens) for hello in hellos)
            self._chain_kinds = tuple(kind for kind, _ in kinds.most_common(CHAIN_KINDS_MAX))

    # --- the core's actions -----------------------------------------------------------------------

    def _deliver(self, action: Deliver) -> None:
        sink = self._sinks.get(action.seq_id)
        if sink is None:
            return
        try:
            if action.logprobs or action.prompt_logprobs is not None:
                sink.on_logprobs(action.logprobs, action.prompt_logprobs)
            sink.on_tokens(action.tokens, cached_token_count=action.cached_token_count)
        except NOT_DEFECTS:
            raise
        except BaseException as defect:
            self._sink_failed(action.seq_id, sink, defect)

    def _finish(self, action: Finished) -> None:
        if (sink := self._forget(action.seq_id)) is None:
            return
        try:
            sink.on_finished(action)
        except NOT_DEFECTS:
            raise
        except BaseException as defect:
            self._sink_failed(action.seq_id, sink, defect)

    def _fail(self, action: Failed) -> None:
        if (sink := self._forget(action.seq_id)) is not None:
            sink.on_failed(action)

    def _sink_failed(self, seq_id: SequenceId, sink: Sink, defect: BaseException) -> None:
        """End a sequence whose sink has a defect, with an error for its client. The others go on."""
        log.error("defect in what receives the tokens of %s: %s", seq_id, report(defect))
        self.client_gone(seq_id)
        sink.on_failed(Failed(seq_id, FailureKind.INTERNAL, INTERNAL))

    def _send(self, action: ToWorker) -> None:
        connection = self._connections.get(action.worker_id)
        if connection is None:
            return  # The core gets an event about the loss.
        try:
            connection.send(action.message)
        except LinkBroken:
            connection.break_off()

    def _forget(self, seq_id: SequenceId) -> Sink | None:
        sink = self._sinks.pop(seq_id, None)
        if not self._sinks:
            self._idle.set()
        return sink
