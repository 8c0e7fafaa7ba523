"""Policies that rank workers one phase at a time: which workers may run a sequence, and how, is decided here.

A ranking of one's own says which of the candidates is best; the filter before it is the same for all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.core.ids import WorkerId
from baton.core.messages import Phase, Role
from router.decisions.cluster.load_account import SEQUENCE_TOKENS
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerSnapshot, pairable_fingerprints
from router.decisions.placement.interface import NoPlace, Placement, PlacementRequest, PolicyTools

ADAPTER_EXTRA_TOKENS = 4 * SEQUENCE_TOKENS
"""How much more load than the least a worker may have and still be preferred for its adapter: loading one
elsewhere costs about as much as a few sequences."""


class Candidate(NamedTuple):
    """One worker, as one sequence that looks for a place sees it."""

    worker: WorkerSnapshot
    has_room: bool
    rank: tuple[bool, bool, bool, bool]
    """Lower ranks go first. A higher rank is used only when there is nothing else."""
    cached_tokens: int = 0
    """Leading tokens of the sequence in its prefix cache."""

    @property
    def worker_id(self) -> WorkerId:
        return self.worker.worker_id

    @property
    def load_tokens(self) -> float:
        return self.worker.load.load_tokens


class RankedChoice(NamedTuple):
    candidate: Candidate
    reason: str


class Ranking(Protocol):
    @property
    def uses_prefix(self) -> bool:
        """False: `cached_tokens` of candidates is always 0."""
        ...

    def choose(
        self,
        phase: Phase,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        snapshot: ClusterSnapshot,
    ) -> RankedChoice:
        """Return one of `candidates`, which is never empty."""
        ...


class RankedPolicy:
    """`PlacementPolicy`. Filters, then lets the ranking choose.

    KV moves only between workers of one fingerprint, so a pair is always of one. Without any possible pair
    (an empty pool, or fingerprints that never meet) `router.fallback_to_other_pool` allows both phases on
    whichever worker there is. A decode or aggregated phase needs room now; a prefill phase may wait at its
    worker."""

    def __init__(self, ranking: Ranking, tools: PolicyTools, *, predicts: bool = False) -> None:
        """`predicts`: placements get a forecast, by which admission decides."""
        self.uses_prefix = ranking.uses_prefix
        self._ranking, self._predictor, self._predicts = ranking, tools.predictor, predicts
        self._disaggregate = tools.config.disaggregate
        self._fallback = tools.config.fallback_to_other_pool

    def place(self, request: PlacementRequest, snapshot: ClusterSnapshot) -> Placement | NoPlace:
        found = self._place(request, snapshot)
        if not self._predicts or isinstance(found, NoPlace):
            return found
        facts, needs = found.prefill.facts, request.needs
        held = request.matched(facts.fingerprint, facts.block_tokens) if self.uses_prefix else {}
        predicted = self._predictor.predict(found.prefill, found.decode, needs, held, now_s=snapshot.now_s)
        forecast = self._predictor.forecast(found.prefill, found.decode, needs, predicted)
        return found._replace(predicted=predicted, forecast=forecast)

    def _place(self, request: PlacementRequest, snapshot: ClusterSnapshot) -> Placement | NoPlace:
        usable = snapshot.pools.usable
        if not usable:
            return NoPlace("no worker takes new sequences")
        fitting = [w for w in usable if w.fits(request.needs.tokens)]
        if not fitting:
            return NoPlace("the sequence is longer than any worker can hold", is_final=True)
        candidates = _candidates(request, snapshot, _healthy(fitting, snapshot.suspended))
        choose = self._chooser(request, snapshot)
        if not self._disaggregate:
            return _aggregated(candidates, choose, "aggregated, since router.disaggregate is off")
        if all(c.worker.facts.role is Role.AGGREGATED for c in candidates):
            return _aggregated(candidates, choose, "aggregated, since every worker is")
        if request.is_last_token:
            prefills = [c for c in candidates if c.worker.facts.role.prefills]
            if prefills:
                return _aggregated(prefills, choose, "aggregated, since one token needs no decode phase")
            return self._without_pair(candidates, choose)
        return self._pair(candidates, choose)

    def _pair(self, fitting: Sequence[Candidate], choose: "_Choose") -> Placement | NoPlace:
        fingerprints = pairable_fingerprints(c.worker for c in fitting)
        if not fingerprints:
            return self._without_pair(fitting, choose)
        decodes = [
            c
            for c in fitting
            if c.worker.facts.role.decodes and c.has_room and c.worker.facts.fingerprint in fingerprints
        ]
        if not decodes:
            return NoPlace("no decode worker has enough free blocks")
        reachable = {c.worker.facts.fingerprint for c in decodes}
        prefills = [
            c
            for c in fitting
            if c.worker.facts.role.prefills
            and not c.worker.load.is_refusing
            and c.worker.facts.fingerprint in reachable
        ]
        if not prefills:
            return NoPlace("every prefill worker refuses new sequences")
        prefill, prefill_reason = choose(Phase.PREFILL, prefills)
        source = prefill.worker
        partners = [c for c in decodes if c.worker.facts.fingerprint == source.facts.fingerprint]
        decode, decode_reason = choose(Phase.DECODE, partners)
        target = decode.worker
        if target.worker_id == source.worker_id:
            return Placement(source, None, f"aggregated on one worker: {prefill_reason}")
        if source.facts.role is Role.AGGREGATED and target.facts.role is Role.AGGREGATED:
            # Disaggregation gains nothing between two aggregated workers. Two full ones that decode for each
            # other would each wait for the other's prefill.
            return Placement(target, None, f"aggregated on one worker: {decode_reason}")
        return Placement(source, target, f"prefill: {prefill_reason}; decode: {decode_reason}")

    def _without_pair(self, fitting: Sequence[Candidate], choose: "_Choose") -> Placement | NoPlace:
        missing = "decode" if any(c.worker.facts.role.prefills for c in fitting) else "prefill"
        reason = f"there is no {missing} worker of a compatible fingerprint"
        if not self._fallback:
            return NoPlace(reason)
        found = _aggregated(fitting, choose, reason)
        return found._replace(is_fallback=True) if isinstance(found, Placement) else found

    def _chooser(self, request: PlacementRequest, snapshot: ClusterSnapshot) -> "_Choose":
        def choose(phase: Phase, candidates: Sequence[Candidate]) -> RankedChoice:
            rank = min(c.rank for c in candidates)
            best = [c for c in candidates if c.rank == rank]
            if self.uses_prefix:
                best = [c._replace(cached_tokens=request.cached_tokens(c.worker)) for c in best]
            return self._ranking.choose(phase, best, request, snapshot)

        return choose


_Choose = Callable[[Phase, Sequence[Candidate]], RankedChoice]


def _healthy(fitting: Sequence[WorkerSnapshot], suspended: frozenset[WorkerId]) -> Sequence[WorkerSnapshot]:
    """Leave out workers with an open circuit breaker, unless no worker large enough or no worker of a phase
    would be left."""
    kept = [w for w in fitting if w.worker_id not in suspended]
    if len(kept) == len(fitting):
        return fitting
    loses_pairs = bool(pairable_fingerprints(fitting)) and not pairable_fingerprints(kept)
    loses_prefill = not any(w.facts.role.prefills for w in kept) and any(
        w.facts.role.prefills for w in fitting
    )
    return fitting if not kept or loses_pairs or loses_prefill else kept


def _candidates(
    request: PlacementRequest, snapshot: ClusterSnapshot, workers: Sequence[WorkerSnapshot]
) -> list[Candidate]:
    preferred, tokens = _preferred(request, snapshot), request.needs.tokens
    return [
        Candidate(
            worker,
            worker.has_room(tokens) and worker.worker_id not in request.kept,
            (
                # A stream goes on with the weights that began it; the worker that just failed comes after any
                # other; a worker that has not reported is unknown, so assumed busy; siblings stay together.
                request.fingerprint not in ("", worker.facts.fingerprint),
                worker.worker_id in request.avoid,
                snapshot.is_stale(worker),
                worker.worker_id not in preferred,
            ),
        )
        for worker in workers
    ]


def _preferred(request: PlacementRequest, snapshot: ClusterSnapshot) -> frozenset[WorkerId]:
    """Return the workers of the sequence's siblings, else those that have its adapter and little more
    load."""
    if request.siblings_at or not request.adapter_at:
        return request.siblings_at
    workers = snapshot.workers
    load_max = min(w.load.load_tokens for w in workers.values()) + ADAPTER_EXTRA_TOKENS
    return frozenset(
        w for w in request.adapter_at if w in workers and workers[w].load.load_tokens <= load_max
    )


def _aggregated(candidates: Sequence[Candidate], choose: _Choose, circumstance: str) -> Placement | NoPlace:
    with_room = [c for c in candidates if c.has_room]
    if not with_room:
        return NoPlace("no worker has enough free blocks")
    chosen, reason = choose(Phase.AGGREGATED, with_room)
    return Placement(chosen.worker, None, f"{circumstance}: {reason}")
