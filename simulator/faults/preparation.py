"""Workers that take longer than a lease to make a grammar or an adapter ready, in some of the runs.

The rules are those of `worker.preparation`, which is asyncio: a cancel, a higher epoch and the loss of the
router end a preparation, and the core hears of what is made ready.
"""

from typing import Protocol

import msgspec

from baton.core.ids import RouterId, SeqKey, SequenceId
from baton.core.messages import CancelSequence, Phase, RouterMessage, StartSequence
from simulator.faults.run_context import RunContext
from simulator.faults.scenario import Scenario
from worker.events import FromRouter, PreparationBegan, PreparationEnded, WorkerEvent

RUNS_SHARE = 0.1
"""Share of the runs in which preparations are slow."""
STARTS_SHARE = 0.3
LEASES = (1.2, 2.5)
"""How many leases a slow preparation takes, at least and at most."""


class PreparingWorker(Protocol):
    name: str
    run: RunContext

    def feed(self, event: WorkerEvent) -> None: ...

    def post_event(self, event: WorkerEvent) -> None: ...


class SlowPreparation:
    """Holds back some of the starts that one worker gets."""

    def __init__(self, worker: PreparingWorker, scenario: Scenario) -> None:
        self._worker, self._lease_s = worker, scenario.transfer.lease_s
        self._rng = worker.run.stream(f"preparation/{worker.name}")
        is_slow = bool(scenario.faults) and worker.run.stream("preparation").random() < RUNS_SHARE
        self._share = STARTS_SHARE if is_slow else 0.0
        self._pending: dict[SequenceId, tuple[RouterId, StartSequence]] = {}

    def holds_back(self, router_id: RouterId, message: RouterMessage) -> bool:
        """Whether the message is kept from the core for now."""
        match message:
            case CancelSequence(seq_id, epoch):
                if self._epoch(seq_id) <= epoch:
                    self._drop(seq_id)
                return False
            case StartSequence():
                return self._takes(router_id, message)
            case _:
                return False

    def router_lost(self, router_id: RouterId) -> None:
        for seq_id in [s for s, (router, _) in self._pending.items() if router == router_id]:
            self._drop(seq_id)

    def _epoch(self, seq_id: SequenceId) -> float:
        pending = self._pending.get(seq_id)
        return float("inf") if pending is None else pending[1].epoch

    def _takes(self, router_id: RouterId, start: StartSequence) -> bool:
        if start.seq_id in self._pending:
            if start.epoch <= self._epoch(start.seq_id):
                return start.epoch == self._epoch(start.seq_id)
            self._drop(start.seq_id)
        if self._share == 0.0 or self._rng.random() >= self._share:
            return False
        delay_s = min(self._rng.uniform(*LEASES) * self._lease_s, start.time_left_s)
        if start.epoch:
            self._worker.feed(FromRouter(router_id, CancelSequence(start.seq_id, start.epoch - 1)))
        self._pending[start.seq_id] = (router_id, start)
        self._worker.feed(PreparationBegan(SeqKey(start.seq_id, start.epoch), start.phase))
        self._worker.run.clock.after(delay_s, self._ready, router_id, start, delay_s)
        return True

    def _ready(self, router_id: RouterId, start: StartSequence, delay_s: float) -> None:
        if self._pending.get(start.seq_id) != (router_id, start):
            return
        del self._pending[start.seq_id]
        if start.phase is Phase.PREFILL:
            self._worker.run.counts["slow preparations of a prefill phase"] += 1
        left_s = max(0.0, start.time_left_s - delay_s)
        self._worker.post_event(FromRouter(router_id, msgspec.structs.replace(start, time_left_s=left_s)))

    def _drop(self, seq_id: SequenceId) -> None:
        pending = self._pending.pop(seq_id, None)
        if pending is not None:
            self._worker.feed(PreparationEnded(SeqKey(seq_id, pending[1].epoch), "cancelled"))
