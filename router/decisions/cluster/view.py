"""The workers that one router knows, where each sequence has reservations, and the cluster's snapshot."""

from collections.abc import Container, Iterator
from typing import NamedTuple

from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Phase, Role, WorkerHello
from router.decisions.cluster.load_account import NO_PROFILE, SequenceProfile
from router.decisions.cluster.snapshot import (
    ClusterSnapshot,
    Pools,
    WorkerSnapshot,
    pairable_fingerprints,
)
from router.decisions.cluster.worker import WorkerView

NOBODY: frozenset[WorkerId] = frozenset()


class _Layout(NamedTuple):
    """What follows from the workers' facts alone, so it holds until one of them changes."""

    usable: tuple[WorkerId, ...]
    prefill: tuple[WorkerId, ...]
    decode: tuple[WorkerId, ...]
    aggregated: tuple[WorkerId, ...]
    has_pairs: bool
    kinds: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, workers: list[WorkerSnapshot]) -> "_Layout":
        usable = [w for w in workers if not w.facts.is_draining]
        aggregated = tuple(w.worker_id for w in usable if w.facts.role is Role.AGGREGATED)
        return cls(
            tuple(w.worker_id for w in usable),
            tuple(w.worker_id for w in usable if w.facts.role.prefills),
            tuple(w.worker_id for w in usable if w.facts.role.decodes),
            aggregated,
            bool(pairable_fingerprints(usable)) and len(aggregated) < len(usable),
            tuple(sorted({(w.facts.fingerprint, w.facts.block_tokens) for w in usable})),
        )


class ClusterView:
    """The only place where workers come and go and where reservations are made."""

    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._workers: dict[WorkerId, WorkerView] = {}
        self._holders: dict[SequenceId, tuple[WorkerId, ...]] = {}
        """Where each sequence has a reservation."""
        self._frozen: dict[WorkerId, WorkerSnapshot] = {}
        self._changed: dict[WorkerId, None] = {}
        """Workers whose snapshot in `_frozen` is no longer true. Ordered, so that runs repeat."""
        self._layout: _Layout | None = None
        self._snapshot: ClusterSnapshot | None = None

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: WorkerId) -> WorkerView:
        return self._workers[worker_id]

    def get(self, worker_id: WorkerId) -> WorkerView | None:
        return self._workers.get(worker_id)

    def join(self, hello: WorkerHello, address: str) -> None:
        assert hello.worker_id not in self._workers
        fleet_costs = [
            w.prediction.costs
            for w in self._workers.values()
            if w.hello.fingerprint == hello.fingerprint and w.prediction.are_costs_measured
        ]
        self._workers[hello.worker_id] = WorkerView(hello, address, fleet_costs, self._on_change)
        self._on_change(hello.worker_id, True)

    def lose(self, worker_id: WorkerId) -> None:
        """Its reservations were released before."""
        assert not self._workers[worker_id].load.reservations
        del self._workers[worker_id]
        self._frozen = {w: frozen for w, frozen in self._frozen.items() if w != worker_id}
        self._changed.pop(worker_id, None)
        self._layout = self._snapshot = None

    # --- snapshots ----------------------------------------------------------------------------------

    def _on_change(self, worker_id: WorkerId, are_facts_new: bool) -> None:
        self._changed[worker_id] = None
        self._snapshot = None
        if are_facts_new:
            self._layout = None

    def snapshot(self, now_s: float, suspended: frozenset[WorkerId] = NOBODY) -> ClusterSnapshot:
        """The cluster as it is now. What a caller keeps of it does not change under its hands."""
        found = self._snapshot
        if found is None:
            found = self._snapshot = self._freeze(now_s, suspended)
        elif found.now_s != now_s or found.suspended is not suspended:
            found = self._snapshot = found._replace(now_s=now_s, suspended=suspended)
        return found

    def _freeze(self, now_s: float, suspended: frozenset[WorkerId]) -> ClusterSnapshot:
        if self._changed:
            frozen = self._frozen.copy()  # the old one is in somebody's snapshot
            for worker_id in self._changed:
                frozen[worker_id] = self._workers[worker_id].snapshot
            self._frozen = frozen
            self._changed.clear()
        frozen = self._frozen
        if self._layout is None:
            self._layout = _Layout.of(list(frozen.values()))
        layout = self._layout
        usable = tuple([frozen[w] for w in layout.usable])
        pools = Pools(
            usable,
            *(
                usable if ids == layout.usable else tuple([frozen[w] for w in ids])
                for ids in (layout.prefill, layout.decode, layout.aggregated)
            ),
        )
        return ClusterSnapshot(
            now_s, frozen, pools, layout.has_pairs, layout.kinds, suspended, self._silence_s
        )

    # --- reservations -------------------------------------------------------------------------------

    def reserve(
        self,
        worker_id: WorkerId,
        seq_id: SequenceId,
        *,
        phase: Phase,
        tokens: int,
        blocks: int,
        profile: SequenceProfile = NO_PROFILE,
        now_s: float = 0.0,
    ) -> None:
        worker = self._workers[worker_id]
        worker.reserve(seq_id, phase=phase, tokens=tokens, blocks=blocks, profile=profile, now_s=now_s)
        self._holders[seq_id] = (*self._holders.get(seq_id, ()), worker_id)

    def release_except(self, seq_id: SequenceId, kept: Container[WorkerId]) -> bool:
        """Release the sequence's reservations at all workers but `kept`; returns whether there were any."""
        holders = self._holders.get(seq_id, ())
        released = [w for w in holders if w not in kept]
        if not released:
            return False
        for worker_id in released:
            self._workers[worker_id].release(seq_id)
        left = tuple(w for w in holders if w in kept)
        if left:
            self._holders[seq_id] = left
        else:
            del self._holders[seq_id]
        return True

    def is_stale(self, worker: WorkerView, now_s: float) -> bool:
        return now_s - worker.load.report_at_s > self._silence_s

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree."""
        for worker in self._workers.values():
            worker.check()
        held = {(s, w.worker_id) for w in self._workers.values() for s in w.load.reservations}
        assert held == {(s, w) for s, holders in self._holders.items() for w in holders}
        frozen = self.snapshot(0.0)
        assert frozen.workers == {w.worker_id: w.snapshot for w in self._workers.values()}
