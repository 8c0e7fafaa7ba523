"""Seeds are run one after another or in several processes, and reported.

A seed has three parts, one after the other: a cluster that serves clients, a control plane with its
replicas (`simulator.faults.control_plane`), and a group of expert ranks (`simulator.faults.experts`).

A seed that fails is reported with the invariant it broke, the history of the request concerned and the
command that repeats it. The counts over all seeds prove that the faults and features under test really
happened: a run in which a class never occurred is a failure of the run, not a success.
"""

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol

import msgspec

from simulator.faults.checkers import Checkers
from simulator.faults.client import SimClient
from simulator.faults.client_drawing import draw_clients
from simulator.faults.control import Cluster
from simulator.faults.control_plane.runner import ControlRun
from simulator.faults.experts.runner import ExpertRun
from simulator.faults.experts.scenario import RankMoment
from simulator.faults.injection import Faults
from simulator.faults.model import Model
from simulator.faults.network import Network
from simulator.faults.rank_faults import with_ranks
from simulator.faults.ranks import RequestPoint
from simulator.faults.reads import SimReads
from simulator.faults.run_context import RunContext, Violation, seq_of
from simulator.faults.scenario import Scenario
from simulator.faults.scenario_drawing import draw_scenario

HISTORY_LINES_MAX = 60
HISTORY_LINE_CHARS_MAX = 220
EVENTS_MAX = 400_000
"""A run of one seed that needs more events than this has gone astray."""

EVENTS_BETWEEN_CHECKS = 16
"""The end of a run is looked for every so many events."""

MUST_HAPPEN = (
    "note: placed",
    "note: retried",
    "note: fallback",
    "note: refused",
    "note: migrated",
    "note: joined",
    "note: hedged",
    "note: hedge_won",
    "note: hedge_lost",
    "retried: drained",
    "failed: retries_spent",
    "breakers open",
    "breakers half_open",
    "breakers closed",
    "resumes",
    "preemptions",
    "prompts with cache hits",
    "steps planned ahead",
    "tails copied",
    "blocks swapped out",
    "blocks swapped in",
    "draft tokens",
    "histories given",
    "embeddings",
    "decode phases joined",
    "grants of blocks",
    "leases released",
    "leases given back unread",
    "leases expired",
    "reads failed",
    "reads unsettled",
    "reads posted late",
    "stale reads refused",
    "reads of a dead owner",
    "messages repeated",
    "blocks copied to the store",
    "blocks copied from the store",
    "blocks written to SSD",
    "blocks read from SSD",
    "blocks recovered from SSD",
    "blocks fetched from a peer",
    "corrupt blocks noticed by a worker",
    "corrupt blocks noticed at the disk",
    "torn writes",
    "writes to a full disk",
    "disk errors",
    "reads that settled late",
    "leases of store nodes released",
    "leases of store nodes lapsed",
    "deadlines that fired at a worker",
    "workers' queues full",
    "attempts that were called off",
    "fault: host_crash",
    "fault: store_clear",
    "clients that came back to a promise",
    "workers lost by silence",
    "frozen workers killed",
    "workers upgraded",
    "left while queued",
    "left while prefilling",
    "left while decoding",
    "ended: finished",
    "ended: failed",
    "ended: gone",
    "ended: broken",
    "control planes killed",
    "control records lost",
    "pauses of the directory",
    "members suspect",
    "members lapsed",
    "renewals after the end",
    "replicas adopted",
    "replicas that failed to start",
    "replicas that never started",
    "replicas killed",
    "replicas that switched roles",
    "replicas replaced by another version",
    "kills that were not confirmed in time",
    "orders accepted",
    "orders refused",
    "autoscaler: blind",
    "autoscaler: grew",
    "autoscaler: shrank",
    "autoscaler: switched roles",
    "autoscaler: to zero",
    "workers of several ranks",
    "reads between unlike shapes",
    "ranks killed",
    "ranks stopped",
    "workers ended with a rank",
    *(f"ranks struck while {point}" for point in RequestPoint),
    "expert rows computed",
    "expert rows sent again",
    "expert rows that waited for a rank",
    "expert rows refused",
    "expert results of closed links",
    "expert maps taken in mid-dispatch",
    "expert maps late",
    "expert ranks suspected",
    "expert ranks left out for being late",
    "expert ranks lost two at once",
    "expert connections that ended",
    "expert groups lost at once",
    "expert groups lost in mid-dispatch",
    "expert callers parked",
    "expert callers parked no more",
    "expert ranks retired",
    "expert ranks that did not start",
    "expert ranks' kills lost",
    "expert callers gone in mid-dispatch",
    "expert control planes restarted",
    "expert loads failed",
    "expert loads whose source was gone",
    "experts dropped",
    "expert fault: node_loss",
    "expert fault: control_stall",
    "expert fault: link_stalls",
    "expert fault: streams_break",
    "expert fault: nodes_left",
    "expert fault: scaling",
    *(f"expert ranks struck while {moment}" for moment in RankMoment),
)
"""Counts that must not be zero over enough seeds."""

SEEDS_FOR_COVERAGE = 100
"""A run of at least this many seeds fails when a count of `MUST_HAPPEN` is zero."""


class SeedOptions(msgspec.Struct, frozen=True):
    """Options of a run of one seed that do not change what the seed draws."""

    keeps_history: bool = True
    """Collect the history of a failure; it costs nothing when there is none."""


class SeedReport(msgspec.Struct, frozen=True):
    """The result of one seed. `invariant` is None when everything held."""

    seed: int
    digest: str
    event_count: int
    virtual_s: float
    counts: dict[str, int]
    faults: tuple[str, ...]
    invariant: int | None = None
    message: str = ""
    checker: str = ""
    """The function that noticed."""
    history: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return self.invariant is None

    @property
    def command(self) -> str:
        return f"baton sim --seed {self.seed}"


class RunReport(msgspec.Struct, frozen=True):
    """The results of many seeds."""

    seed_count: int
    event_count: int
    virtual_s: float
    counts: dict[str, int]
    failures: tuple[SeedReport, ...]

    @property
    def never_happened(self) -> tuple[str, ...]:
        return tuple(name for name in MUST_HAPPEN if not self.counts.get(name))

    @property
    def is_ok(self) -> bool:
        """Nothing failed, and (with enough seeds to expect it) everything under test really happened."""
        return not self.failures and (self.seed_count < SEEDS_FOR_COVERAGE or not self.never_happened)


class SeedRun:
    """One seed: a cluster, its clients and its faults, from the first event to rest."""

    def __init__(self, seed: int) -> None:
        self.context = RunContext(seed)
        drawn = draw_scenario(self.context.stream("scenario"))
        self.scenario: Scenario = with_ranks(drawn, self.context.stream("ranks"))
        scenario = self.scenario
        self.clients = draw_clients(scenario, self.context.stream("clients"))
        model = Model()
        self.checkers = Checkers(self.context, self.clients, scenario, model)
        network = Network(self.context, latency_s=scenario.network_latency_s)
        reads = SimReads(
            network,
            latency_s=scenario.read_latency_s,
            block_s=scenario.read_block_s,
            late_s=scenario.transfer.lease_s,
        )
        store_reads = SimReads(
            network,
            latency_s=scenario.read_latency_s,
            block_s=scenario.read_block_s,
            late_s=scenario.store.lease_s,
        )
        self.cluster = Cluster(
            self.context,
            scenario,
            network=network,
            reads=reads,
            store_reads=store_reads,
            model=model,
            checkers=self.checkers,
        )
        self.faults = Faults(self.cluster)

    @property
    def faults_drawn(self) -> frozenset[str]:
        return self.scenario.faults

    def play(self) -> None:
        """Run it. Raises Violation, or whatever a decision object raised."""
        try:
            self._play()
        finally:
            self.cluster.close()

    def _play(self) -> None:
        self.faults.schedule()
        for client in self.clients:
            self._schedule(client)
        self.checkers.comes_back = self._schedule
        checkers, clock, scenario = self.checkers, self.context.clock, self.scenario
        self._run_until(self.faults.ends_s, self._is_astray)
        self._run_until(self.faults.ends_s + scenario.ends_within_s, checkers.all_ended)
        checkers.liveness(scenario.ends_within_s)
        self._run_until(clock.now_s + scenario.settles_within_s, self.cluster.is_at_rest)
        for tenant, record in scenario.tenants.items():
            if record.tokens_per_minute and (owed_s := self.cluster.owed_s(tenant)) is not None:
                checkers.quotas.at_rest(tenant, owed_s)
        # What is held for a bounded time only, and by nobody who waits for it, may still be there. A second
        # copy of a request is held so as well, and it may come seconds after everything is over.
        lingers_from_s = max(clock.now_s, self.cluster.network.last_repeat_s)
        self._run_until(lingers_from_s + scenario.lingers_s, self._is_astray)
        self._run_until(clock.now_s + scenario.settles_within_s, self.cluster.is_at_rest)
        checkers.rest(self.cluster.workers, self.cluster.routers, self.cluster.store_nodes)

    def _schedule(self, client: SimClient) -> None:
        self.context.clock.at(client.arrives_s, lambda: self.cluster.submit(client))

    def _run_until(self, end_s: float, is_over: Callable[[], bool]) -> None:
        self.context.clock.run(until_s=end_s, is_over=is_over, check_every=EVENTS_BETWEEN_CHECKS)

    def _is_astray(self) -> bool:
        if self.context.clock.event_count > EVENTS_MAX:
            raise Violation(6, f"{EVENTS_MAX} events and no end")
        return False


class _Part(Protocol):
    """A part of a seed."""

    @property
    def context(self) -> RunContext: ...

    @property
    def faults_drawn(self) -> frozenset[str]: ...

    def play(self) -> None:
        """Run it. Raises Violation, or whatever a decision object raised."""
        ...


def run_seed(seed: int, *, options: SeedOptions | None = None) -> SeedReport:
    """Run one seed. It never raises for what the run did: a crash of a decision object is invariant 0."""
    keeps_history = options is None or options.keeps_history
    report = _play(seed, SeedRun(seed), keeps_history=keeps_history)
    if not report.is_ok:
        return report
    for make in (ControlRun, ExpertRun):
        rest = _play(seed, make(RunContext(seed)), keeps_history=keeps_history)
        report = msgspec.structs.replace(
            rest,
            digest=f"{report.digest}+{rest.digest}",
            event_count=report.event_count + rest.event_count,
            virtual_s=report.virtual_s + rest.virtual_s,
            counts=dict(Counter(report.counts) + Counter(rest.counts)),
            faults=report.faults + rest.faults,
        )
        if not report.is_ok:
            break
    return report


def _play(seed: int, part: _Part, *, keeps_history: bool) -> SeedReport:
    invariant: int | None = None
    message, seq_id, checker = "", "", ""
    try:
        with _quiet():
            part.play()
    except Violation as violation:
        checker = _raiser(violation)
        invariant, message, seq_id = violation.invariant, violation.message, violation.seq_id
    except Exception as error:
        checker = _raiser(error)
        invariant, message = 0, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    run = part.context
    return SeedReport(
        seed=seed,
        digest=run.digest,
        event_count=run.clock.event_count,
        virtual_s=run.clock.now_s,
        counts=dict(run.counts),
        faults=tuple(sorted(part.faults_drawn)),
        invariant=invariant,
        message=message,
        checker=checker,
        history=tuple(_history(run, seq_id)) if invariant is not None and keeps_history else (),
    )


def _raiser(error: BaseException) -> str:
    """Return the name of the function that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_qualname


@contextmanager
def _quiet() -> Generator[None]:
    """Log nothing: what production would log of thousands of faults helps nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _history(run: RunContext, seq_id: str) -> Iterator[str]:
    """Yield the last things that happened to `seq_id`, or at all when no request is to blame."""
    about = [
        (time_s, who, what)
        for time_s, who, what in run.trace
        if not seq_id or seq_of(what).split("@")[0] == seq_id or seq_id in _seqs_in(what)
    ]
    for time_s, who, what in about[-HISTORY_LINES_MAX:]:
        text = f"{time_s:9.4f}  {who:<16} {what}"
        yield text if len(text) <= HISTORY_LINE_CHARS_MAX else text[:HISTORY_LINE_CHARS_MAX] + "…"


def _seqs_in(value: object) -> set[str]:
    """Return the sequences that a step's output or result concerns."""
    message = getattr(value, "message", None)
    outputs = getattr(message, "outputs", ())
    return {str(output.seq_id) for output in outputs}


def run_seeds(count: int, *, start: int = 0, jobs: int = 1) -> Iterator[SeedReport]:
    """Yield reports as they come, in order of seed."""
    seeds = range(start, start + count)
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, chunksize=max(1, min(16, count // (4 * jobs))))


def summarise(reports: Iterator[SeedReport] | list[SeedReport]) -> RunReport:
    counts: Counter[str] = Counter()
    failures: list[SeedReport] = []
    seed_count = event_count = 0
    virtual_s = 0.0
    for report in reports:
        seed_count += 1
        event_count += report.event_count
        virtual_s += report.virtual_s
        counts.update(report.counts)
        if not report.is_ok:
            failures.append(report)
    return RunReport(seed_count, event_count, virtual_s, dict(counts), tuple(failures))
