"""The workers that one decision looks at: of any pool a bounded number, however large the cluster is."""

from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from random import Random

from baton.core.geometry import blocks_for
from baton.core.ids import WorkerId
from baton.core.messages import Role
from router.decisions.cluster.load_account import SEQUENCE_TOKENS
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerSnapshot
from router.decisions.placement.interface import NOBODY, PlacementRequest

LEAST_BUSY, HOLDERS, SAMPLED = 8, 4, 2
"""Candidates for one phase: those with the least to do, those that hold most of the prompt, some at
random."""

decode_load = attrgetter("prediction.decode_count")
prefill_load = attrgetter("prediction.backlog.tokens")


def aggregated_load(worker: WorkerSnapshot) -> int:
    return worker.load.tokens + SEQUENCE_TOKENS * worker.load.sequences


class CandidateFinder:
    def __init__(self, request: PlacementRequest, snapshot: ClusterSnapshot, rng: Random) -> None:
        self._request, self._snapshot, self._rng = request, snapshot, rng
        self._tokens = request.needs.tokens
        self._most: list[WorkerSnapshot] | None = None
        suspended, usable = snapshot.suspended, snapshot.pools.usable
        left_out = NOBODY
        # Breakers are ignored where none of the others is large enough; kept room is kept even then.
        if suspended and any(self.fits(w) for w in usable if w.worker_id not in suspended):
            left_out = suspended
        self._left_out = left_out | request.kept
        self._is_common = not request.fingerprint and not request.avoid

    # --- who may ----------------------------------------------------------------------------------

    def fits(self, worker: WorkerSnapshot) -> bool:
        return worker.fits(self._tokens)

    def takes_prompt(self, worker: WorkerSnapshot) -> bool:
        facts = worker.facts
        may = facts.role.prefills and not facts.is_draining and not worker.load.is_refusing
        return may and worker.worker_id not in self._left_out and self.fits(worker)

    def takes_decode(self, worker: WorkerSnapshot) -> bool:
        return worker.facts.role.decodes and self.takes_both(worker)

    def takes_both(self, worker: WorkerSnapshot) -> bool:
        facts, load = worker.facts, worker.load
        if facts.is_draining or load.is_refusing or worker.worker_id in self._left_out:
            return False
        blocks = blocks_for(self._tokens + 1, facts.block_tokens)  # and the token that is sampled next
        fits = self._tokens < facts.max_model_tokens and blocks <= facts.block_count
        return fits and blocks <= load.free_blocks

    def _rank(self, worker: WorkerSnapshot) -> int:
        """Lower first; a higher rank is used only when there is nothing else. A stream goes on with the
        weights that began it; who just failed comes after any other; who has not reported is unknown."""
        is_stale = self._snapshot.is_stale(worker)
        if self._is_common:
            return is_stale
        request = self._request
        is_foreign = request.fingerprint not in ("", worker.facts.fingerprint)
        return 4 * is_foreign + 2 * (worker.worker_id in request.avoid) + is_stale

    # --- which of them ----------------------------------------------------------------------------

    def candidates(
        self,
        pool: Sequence[WorkerSnapshot],
        may: Callable[[WorkerSnapshot], bool],
        load: Callable[[WorkerSnapshot], float],
    ) -> list[WorkerSnapshot]:
        """The best rank's least busy, most cached, and some at random."""
        if len(pool) <= LEAST_BUSY + HOLDERS + SAMPLED:
            return self.best_rank([w for w in pool if may(w)])
        found: dict[WorkerId, WorkerSnapshot] = {}
        lesser: list[WorkerSnapshot] = []
        for worker in sorted(pool, key=load):
            if may(worker):
                if self._rank(worker):
                    lesser.append(worker)
                    continue
                found[worker.worker_id] = worker
                if len(found) == LEAST_BUSY:
                    break
        if not found:
            return self.best_rank(lesser)[: LEAST_BUSY + HOLDERS + SAMPLED]
        for worker in (*self.holders(), *self._rng.sample(pool, SAMPLED)):
            if worker.worker_id not in found and may(worker) and not self._rank(worker):
                found[worker.worker_id] = worker
        return list(found.values())

    def best_rank(self, able: list[WorkerSnapshot]) -> list[WorkerSnapshot]:
        if not able:
            return able
        ranks = [self._rank(w) for w in able]
        best = min(ranks)
        return [w for w, rank in zip(able, ranks, strict=True) if rank == best]

    def holders(self) -> list[WorkerSnapshot]:
        """Workers of any role: those that hold most of the prompt."""
        if self._most is None:
            held: dict[WorkerId, int] = {}
            for kind in self._snapshot.kinds:
                held.update(self._request.matched(*kind))
            ids = nlargest(2 * HOLDERS, held, key=held.__getitem__)
            workers = self._snapshot.workers
            self._most = [workers[w] for w in ids if w in workers]
        return self._most


def may_pair(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    """Never one with itself, and never two aggregated ones: nothing is gained between equals, and two that
    decode for each other, both full, would each wait for the other's prefill."""
    if prefill is decode or prefill.facts.fingerprint != decode.facts.fingerprint:
        return False
    return prefill.facts.role is not Role.AGGREGATED or decode.facts.role is not Role.AGGREGATED
