"""Invariants 11 and 12, seen from outside: whom a router keeps out, and how much it does twice."""

from collections import Counter

from baton.config.router import RouterConfig
from baton.core.ids import WorkerId
from router.decisions.attempts import NOT_BUDGETED
from router.decisions.events import Failed, FailureKind, Note, RetryCause
from router.decisions.retry_budgets import SLICE_S, WINDOW_S
from simulator.faults.observed_processes import ObservedRouter
from simulator.faults.run_context import RunContext, Violation

CLOCK_SLACK = 1.02
"""Factor by which a router's clock may be fast or slow."""


class FailureChecker:
    """Checks of one router."""

    def __init__(self, run: RunContext, config: RouterConfig) -> None:
        self._run, self._config = run, config
        self._charged_s: list[float] = []
        self._finished_s: list[float] = []
        self._losses: Counter[str] = Counter()
        self._placed: set[str] = set()
        self._hedges = 0
        self._open_since_s: dict[WorkerId, float] = {}
        self._states: dict[WorkerId, str] = {}

    def finished(self) -> None:
        self._finished_s.append(self._run.clock.now_s)

    def failed(self, action: Failed) -> None:
        """Check that a sequence is given up only after its attempts, or while the budget is spent. Migrations
        count in neither."""
        lost = self._losses[action.seq_id] + 1
        if action.kind is FailureKind.ATTEMPTS and lost < self._config.attempts_max:
            raise Violation(12, f"given up after {lost} attempts: {action.message}", seq_id=action.seq_id)
        if action.kind is FailureKind.RETRIES_SPENT:
            since_s = self._run.clock.now_s - (WINDOW_S + SLICE_S) * CLOCK_SLACK
            charged = sum(at_s > since_s for at_s in self._charged_s)
            if charged < self._config.retry_floor:
                raise Violation(12, f"given up after {charged} charged retries", seq_id=action.seq_id)

    def noted(self, note: Note, *, is_begun: bool) -> None:
        """Check the budgets. `is_begun` says that the client has tokens, so that its stream goes on in any
        case."""
        match note.what:
            case "placed" | "fallback":
                self._placed.add(note.seq_id)
            case "hedged":
                self._is_within_hedges(note.seq_id)
            case "retried" if note.cause is not RetryCause.DRAINED:
                self._losses[note.seq_id] += 1
                if note.cause not in NOT_BUDGETED or self._losses[note.seq_id] > 1:
                    self._is_within_retries(note.seq_id, is_begun=is_begun)
            case _:
                pass

    def observe_router(self, router: ObservedRouter) -> None:
        """Look after every event at whom the router keeps out."""
        if not router.core.has_open_breakers and not any(s != "closed" for s in self._states.values()):
            return
        workers = router.core.status().workers
        now_s, counts = self._run.clock.now_s, self._run.counts
        for worker in workers:
            if self._states.get(worker.worker_id, "closed") != worker.breaker:
                self._states[worker.worker_id] = worker.breaker
                counts[f"breakers {worker.breaker}"] += 1
            if worker.breaker != "open":
                self._open_since_s.pop(worker.worker_id, None)
                continue
            since_s = self._open_since_s.setdefault(worker.worker_id, now_s)
            patience_s = CLOCK_SLACK * self._config.breaker_open_max_s + self._config.worker_silence_s
            if now_s - since_s > patience_s:
                raise Violation(11, f"{router.name} keeps {worker.worker_id} out for {now_s - since_s:.1f} s")
        known = {worker.worker_id for worker in workers}
        self._open_since_s = {w: s for w, s in self._open_since_s.items() if w in known}
        self._states = {w: state for w, state in self._states.items() if w in known}
        usable = [worker for worker in workers if not worker.is_draining]
        for phase in ("prefills", "decodes"):
            pool = [worker for worker in usable if getattr(worker.role, phase)]
            if pool and all(worker.is_suspended for worker in pool):
                raise Violation(11, f"{router.name} keeps out all of {[w.worker_id for w in pool]}")

    def _is_within_retries(self, seq_id: str, *, is_begun: bool) -> None:
        now_s = self._run.clock.now_s
        window_s = WINDOW_S / CLOCK_SLACK
        earning_s = (WINDOW_S + SLICE_S) * CLOCK_SLACK
        self._charged_s = [at_s for at_s in self._charged_s if at_s > now_s - earning_s]
        self._charged_s.append(now_s)
        self._finished_s = [at_s for at_s in self._finished_s if at_s > now_s - earning_s]
        allowed = self._config.retry_floor + self._config.retry_share * len(self._finished_s)
        charged = sum(at_s > now_s - window_s for at_s in self._charged_s)
        if charged > allowed and not is_begun:
            raise Violation(
                12,
                f"{charged} attempts made again within {window_s:.1f} s, {allowed:.1f} allowed",
                seq_id=seq_id,
            )

    def _is_within_hedges(self, seq_id: str) -> None:
        self._hedges += 1
        allowed = self._config.hedge_share * len(self._placed) + 1e-6
        if self._hedges > allowed:
            raise Violation(12, f"{self._hedges} second attempts, {allowed:.1f} allowed", seq_id=seq_id)
