"""Invariant 10 at a router: a worker that has not reported is no better than one that says it is idle."""

from baton.core.ids import WorkerId
from baton.core.messages import LoadReport, WorkerHello
from router.decisions.events import FromWorker, Note, RouterEvent, WorkerJoined, WorkerLost, WorkerUpdated
from simulator.faults.client import SimSequence
from simulator.faults.observed_processes import ObservedRouter
from simulator.faults.run_context import RunContext, Violation

CLOCK_SLACK = 1.02
FRESH_SHARE = 0.5
"""A report counts as fresh for this part of the time after which it is stale."""


class _Known:
    """What one router heard of one worker."""

    __slots__ = ("hello", "is_closed", "report", "report_s", "running")

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.is_closed = False
        self.report: LoadReport | None = None
        self.report_s = float("-inf")
        self.running: set[str] = set()
        """Sequences that the router placed there, as far as they may still run."""

    @property
    def is_idle(self) -> bool:
        report = self.report
        if report is None or report.is_draining or self.running:
            return False
        busy = report.waiting_count + report.running_count + report.incoming_count
        return not busy and report.free_blocks == self.hello.block_count


class StalenessChecker:
    """What a router knows of its workers, and whom it prefers."""

    def __init__(self, run: RunContext, *, silence_s: float) -> None:
        self._run, self._silence_s = run, silence_s
        self._workers: dict[WorkerId, _Known] = {}
        self._sequences: dict[str, SimSequence] = {}

    def observe(self, event: RouterEvent) -> None:
        match event:
            case WorkerJoined(hello):
                self._workers[hello.worker_id] = _Known(hello)
            case WorkerLost(worker_id):
                self._workers.pop(worker_id, None)
            case WorkerUpdated(worker_id, _, is_draining, is_suspect) if worker_id in self._workers:
                self._workers[worker_id].is_closed = is_draining or is_suspect
            case FromWorker(worker_id, LoadReport() as report) if worker_id in self._workers:
                known = self._workers[worker_id]
                known.report, known.report_s = report, self._run.clock.now_s
            case _:
                pass

    def placed(self, router: ObservedRouter, note: Note, sequence: SimSequence) -> None:
        if sequence.placements == 1 and not router.core.has_open_breakers and not router.core.peers.count:
            for worker_id in note.worker_ids:
                self._is_preferred_rightly(worker_id, note, sequence)
        self._sequences[sequence.seq_id] = sequence
        for worker_id in note.worker_ids:
            if (known := self._workers.get(worker_id)) is not None:
                known.running.add(sequence.seq_id)

    def _is_preferred_rightly(self, worker_id: WorkerId, note: Note, sequence: SimSequence) -> None:
        chosen, now_s = self._workers.get(worker_id), self._run.clock.now_s
        if chosen is None or now_s - chosen.report_s <= self._silence_s * CLOCK_SLACK:
            return
        self._run.counts["workers chosen though stale"] += 1
        for other_id, other in self._workers.items():
            if other_id in note.worker_ids:
                continue  # it has the other phase of the sequence
            is_fresh = now_s - other.report_s < self._silence_s * FRESH_SHARE
            if not is_fresh or other.is_closed or not self._is_idle(other) or not _are_alike(chosen, other):
                continue
            raise Violation(
                10,
                f"{worker_id} is chosen, which last reported {now_s - chosen.report_s:.2f} s ago; {other_id} "
                "reports that it is idle",
                seq_id=sequence.seq_id,
            )

    def _is_idle(self, known: _Known) -> bool:
        known.running = {name for name in known.running if self._sequences[name].ending is None}
        return known.is_idle


def _are_alike(one: _Known, other: _Known) -> bool:
    if one.report is None or other.report is None:
        return False
    return one.report.role is other.report.role and one.hello.fingerprint == other.hello.fingerprint
