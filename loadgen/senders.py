"""Sends a plan from one process, or from several, so that the limit of one core does not cap the rate.

Several processes share the plan by conversation, in turn, so that the turns of one conversation stay
together. All use one instant of CLOCK_MONOTONIC as origin and report to the parent a few times per second.
"""

import asyncio
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import uvloop

from baton.core import garbage
from baton.core.errors import SetupError
from loadgen.answers import digest
from loadgen.client import parse_url, send
from loadgen.conversations import Conversations
from loadgen.health import ClientHealth, LoopWatch, worst_of
from loadgen.lengths import PlannedRequest, ReplayPlan
from loadgen.open_files import allow_connections
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.runner import ReplayObserver, replay_plan
from loadgen.sender_processes import READY, SenderProcesses, SenderUpdate
from loadgen.sse import Answer
from loadgen.target import Api, ReplayTarget
from loadgen.users import Users

REPORT_EVERY_S = 0.2
READY_TIMEOUT_S = 60.0
CLIENTS_MAX = 64
GARBAGE_THRESHOLDS = (20_000, 100, 100)


@dataclass(frozen=True, slots=True)
class SendLimits:
    timeout_s: float
    connections_max: int


@dataclass(frozen=True, slots=True)
class Sending:
    """Everything that a sender process needs; it is pickled."""

    plan: ReplayPlan
    url: str
    api_key: str
    model: str
    api: Api
    tokens: TokenRange
    seed: int
    limits: SendLimits
    wait_for_turns: bool = False
    users: Users = field(default_factory=Users)
    is_baton: bool = False
    openai_only: bool = False
    keeps_answers: bool = False
    """Answers are kept as digests in the records."""


@dataclass(frozen=True, slots=True)
class Sent:
    records: list[RequestRecord]
    """Records in the order in which the requests were sent."""
    was_stopped: bool
    health: ClientHealth


def sending(
    plan: ReplayPlan, target: ReplayTarget, tokens: TokenRange, *, seed: int, limits: SendLimits
) -> Sending:
    """A job of the common kind; make others with `dataclasses.replace`."""
    return Sending(
        plan,
        target.server.origin,
        target.server.api_key,
        target.model,
        target.api,
        tokens,
        seed,
        limits,
        is_baton=target.is_baton,
        openai_only=target.openai_only,
    )


def send_plan(job: Sending, observer: ReplayObserver, *, clients: int = 1) -> Sent:
    """Returns when all requests have ended, or soon after SIGINT. Raises SetupError."""
    if not 1 <= clients <= CLIENTS_MAX:
        raise SetupError(f"--clients {clients}: must be from 1 to {CLIENTS_MAX}")
    run = _send_here(job, observer) if clients == 1 else _send_there(_shares(job, clients), observer)
    return uvloop.run(run)


async def _send_here(job: Sending, observer: ReplayObserver) -> Sent:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        with _asked_whether_to_stop(observer, stop.set):
            records, health = await _send(job, observer, stop, origin_s=None)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return Sent(records, stop.is_set(), worst_of([health], records))


@contextmanager
def _asked_whether_to_stop(observer: ReplayObserver, stop: Callable[[], None]) -> Generator[None]:
    """Ask the observer by the clock, because a server that answers nothing causes no event."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        nonlocal timer
        if observer.wants_stop():
            stop()
        else:
            timer = loop.call_later(REPORT_EVERY_S, ask)

    timer = loop.call_later(REPORT_EVERY_S, ask)
    try:
        yield
    finally:
        timer.cancel()


async def _send(
    job: Sending, observer: ReplayObserver, stop: asyncio.Event, *, origin_s: float | None
) -> tuple[list[RequestRecord], ClientHealth]:
    server = parse_url(job.url, api_key=job.api_key)
    target = ReplayTarget(
        server, job.model, job.api, None, is_baton=job.is_baton, openai_only=job.openai_only
    )
    prompts = PromptMaker(job.plan, job.tokens, seed=job.seed)
    talks = Conversations(job.plan, prompts, job.api, remembers=job.wait_for_turns)
    disconnects = {r.index: r.disconnect for r in job.plan.requests if r.disconnect is not None}

    def message(request: PlannedRequest) -> bytes:
        return target.message(request, talks.prompt(request), api_key=job.users.key_of(request.tenant))

    async def one(message: bytes, record: RequestRecord) -> None:
        is_wanted = talks.wants_answer(record.index)
        answer = Answer() if is_wanted or job.keeps_answers else None
        await send(
            server,
            message,
            record,
            timeout_s=job.limits.timeout_s,
            disconnect=disconnects.get(record.index),
            answer=answer,
        )
        if answer is not None and record.outcome is RequestOutcome.COMPLETED:
            if is_wanted:
                talks.answered(record.index, answer)
            if job.keeps_answers:
                record.answer = digest(answer)

    allow_connections(job.limits.connections_max)
    # A long pause of the garbage collector would look like a pause of the server.
    with garbage.spared(GARBAGE_THRESHOLDS):
        async with LoopWatch() as watch:
            records = await replay_plan(
                job.plan.requests,
                message,
                one,
                connections_max=job.limits.connections_max,
                observer=observer,
                stop=stop,
                wait_for_turns=job.wait_for_turns,
                origin_s=origin_s,
            )
            return records, watch.health()


def _shares(job: Sending, clients: int) -> list[Sending]:
    """Split by conversation, in turn in the order of their first requests. Empty parts are left out."""
    owner: dict[str | int, int] = {}
    shares: list[list[PlannedRequest]] = [[] for _ in range(clients)]
    for request in job.plan.requests:
        key = request.index if request.session is None else request.session
        shares[owner.setdefault(key, len(owner) % clients)].append(request)
    limits = replace(job.limits, connections_max=max(1, job.limits.connections_max // clients))
    return [
        replace(job, plan=replace(job.plan, requests=tuple(share)), limits=limits)
        for share in shares
        if share
    ]


async def _send_there(jobs: Sequence[Sending], observer: ReplayObserver) -> Sent:
    processes = SenderProcesses(jobs, child_main, observer, timeout_s=READY_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, processes.stop)
    try:
        with _asked_whether_to_stop(observer, processes.stop):
            await processes.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        processes.close()
    records = sorted(processes.records, key=lambda r: (r.planned_s, r.index))
    return Sent(records, processes.is_stopped, worst_of(processes.healths, records))


def child_main(job: Sending, link: "Connection[object, object]") -> None:
    """The main function of a sender process: report ready, wait for the start instant, then send and
    report."""
    link.send(READY)
    origin_s = link.recv()
    if isinstance(origin_s, float):  # else the run is stopped before it began
        uvloop.run(_child(job, link, origin_s))


async def _child(job: Sending, link: "Connection[object, object]", origin_s: float) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    news = SenderUpdate([], [])

    def report() -> None:
        nonlocal news, timer
        if news.sent or news.ended:
            link.send(news)
            news = SenderUpdate([], [])
        timer = loop.call_later(REPORT_EVERY_S, report)

    def hear() -> None:
        # The run must stop, or the parent is gone. Read the rest, because closing a socket with unread data
        # is an error.
        loop.remove_reader(link.fileno())
        with suppress(EOFError, OSError):
            link.recv()
        stop.set()

    timer = loop.call_later(REPORT_EVERY_S, report)
    loop.add_reader(link.fileno(), hear)
    observer = ReplayObserver(
        lambda record: news.sent.append(replace(record)), lambda record: news.ended.append(record)
    )
    _, health = await _send(job, observer, stop, origin_s=origin_s)
    timer.cancel()
    loop.remove_reader(link.fileno())
    link.send(news)
    link.send(health)
    link.close()
