"""Which workers may run a sequence, and how: as a pair, or whole on one. Policies choose among them."""

from collections.abc import Callable, Sequence
from random import Random

from baton.core.ids import WorkerId
from baton.core.messages import Phase, Role
from router.decisions.placement.views import (
    Choice,
    Matched,
    NoPlace,
    Placement,
    Policy,
    RequestView,
    WorkerView,
)

Chooser = Callable[[Phase, Sequence[WorkerView]], Choice]


def place(
    request: RequestView,
    workers: Sequence[WorkerView],
    *,
    policy: Policy,
    disaggregate: bool,
    fallback: bool,
    rng: Random,
) -> Placement | NoPlace:
    """Filter, then let `policy` choose.

    KV moves only between workers of one fingerprint, so a pair is always of one. Without any possible
    pair (an empty pool, or fingerprints that never meet) `fallback` allows both phases on whichever
    worker there is. A decode or whole phase needs room now; a prefill phase may wait at its worker.
    """
    usable = [w for w in workers if not w.is_draining]
    if not usable:
        return NoPlace("no worker takes new sequences")
    fitting = [w for w in usable if w.fits]
    if not fitting:
        return NoPlace("longer than any worker can hold", is_final=True)
    fitting = _healthy(fitting)
    choose = _chooser(request, policy, rng)
    if not disaggregate:
        return _whole(fitting, choose, "not disaggregated")
    if all(w.role is Role.AGGREGATED for w in fitting):
        return _whole(fitting, choose, "every worker takes both phases")
    if request.is_last_token:
        prefills = [w for w in fitting if w.role.prefills]
        if prefills:
            return _whole(prefills, choose, "one token: no decode phase")
        return _without_pair(fitting, choose, fallback)
    return _pair(fitting, choose, fallback)


def _healthy(fitting: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Without those whose breaker is open, unless that takes away a phase, or all that is large enough."""
    kept = [w for w in fitting if not w.is_suspended]
    if len(kept) == len(fitting):
        return fitting
    loses_pairs = bool(pairable_fingerprints(fitting)) and not pairable_fingerprints(kept)
    loses_prefill = not any(w.role.prefills for w in kept) and any(w.role.prefills for w in fitting)
    return fitting if not kept or loses_pairs or loses_prefill else kept


def pairable_fingerprints(workers: Sequence[WorkerView]) -> set[str]:
    prefills = {w.fingerprint for w in workers if w.role.prefills}
    return prefills & {w.fingerprint for w in workers if w.role.decodes}


def _pair(fitting: Sequence[WorkerView], choose: Chooser, fallback: bool) -> Placement | NoPlace:
    fingerprints = pairable_fingerprints(fitting)
    if not fingerprints:
        return _without_pair(fitting, choose, fallback)
    decodes = [w for w in fitting if w.role.decodes and w.has_room and w.fingerprint in fingerprints]
    if not decodes:
        return NoPlace("no decode worker has room")
    reachable = {w.fingerprint for w in decodes}
    prefills = [w for w in fitting if w.role.prefills and not w.is_refusing and w.fingerprint in reachable]
    if not prefills:
        return NoPlace("no prefill worker takes more")
    prefill, why_prefill = choose(Phase.PREFILL, prefills)
    partners = [w for w in decodes if w.fingerprint == prefill.fingerprint]
    decode, why_decode = choose(Phase.DECODE, partners)
    if decode.worker_id == prefill.worker_id:
        return Placement(prefill, None, f"both phases on one worker: {why_prefill}")
    if prefill.role is Role.AGGREGATED and decode.role is Role.AGGREGATED:
        # Nothing is gained between equals, and two that decode for each other, both full, would each
        # wait for the other's prefill.
        return Placement(decode, None, f"both phases on one worker: {why_decode}")
    return Placement(prefill, decode, f"prefill: {why_prefill}; decode: {why_decode}")


def _without_pair(fitting: Sequence[WorkerView], choose: Chooser, fallback: bool) -> Placement | NoPlace:
    missing = "prefill" if not any(w.role.prefills for w in fitting) else "decode"
    reason = f"no {missing} worker to pair with"
    if not fallback:
        return NoPlace(reason)
    found = _whole(fitting, choose, reason)
    return found._replace(is_fallback=True) if isinstance(found, Placement) else found


def _whole(candidates: Sequence[WorkerView], choose: Chooser, circumstance: str) -> Placement | NoPlace:
    roomy = [w for w in candidates if w.has_room]
    if not roomy:
        return NoPlace("no worker has room")
    chosen, reason = choose(Phase.AGGREGATED, roomy)
    return Placement(chosen, None, f"{circumstance}: {reason}")


def _chooser(request: RequestView, policy: Policy, rng: Random) -> Chooser:
    def choose(phase: Phase, workers: Sequence[WorkerView]) -> Choice:
        rank = min(map(_rank, workers))
        best = [w for w in workers if _rank(w) == rank]
        return policy.choose(phase, best, _matched(request, policy, best), rng)

    return choose


def _rank(worker: WorkerView) -> tuple[bool, bool, bool, bool]:
    """Lower first; a higher rank is used only when there is nothing else.

    A stream goes on with the weights that began it; the worker that just failed comes after any
    other; a worker that has not reported is unknown, so assumed busy; siblings stay together.
    """
    return worker.is_foreign, worker.is_avoided, worker.is_stale, not worker.is_preferred


def _matched(request: RequestView, policy: Policy, workers: Sequence[WorkerView]) -> Matched:
    if not policy.uses_prefix:
        return {}
    kinds = {(w.fingerprint, w.block_tokens) for w in workers}
    if len(kinds) == 1:
        return request.matched(*kinds.pop())
    merged: dict[WorkerId, int] = {}
    ids_of = {
        kind: {w.worker_id for w in workers if (w.fingerprint, w.block_tokens) == kind} for kind in kinds
    }
    for kind, ids in ids_of.items():
        found = request.matched(*kind)
        merged.update({worker_id: found[worker_id] for worker_id in ids & found.keys()})
    return merged
