"""Placement in seconds: two workers, or one for both phases, by what is predicted of each.

First comes the chance that the request's objectives hold, less what the placement takes away from those
that decode there; then cost: seconds that the request takes, and that it makes others wait. A cached prefix,
a loaded adapter, siblings on their way and a short queue are all seconds, so none is a case of its own.

A decision looks at a bounded number of workers: those that hold most of the prompt, those with the least
to do, and a few at random. Phases are judged apart and only the best few pairs as pairs.
"""

from collections.abc import Callable, Sequence
from heapq import nlargest
from math import ceil
from operator import attrgetter
from random import Random
from typing import NamedTuple

from baton.core.geometry import blocks_for
from baton.core.ids import WorkerId
from baton.core.messages import Role
from router.decisions.cluster_view import ClusterView, Worker
from router.decisions.placement.views import SEQUENCE_TOKENS, Matched, NoPlace, Placement, WorkerView
from router.decisions.prediction.forecast import Forecast, Predicted, Prefill, Want
from router.decisions.prediction.predictor import Predictor, chance

LEAST_BUSY, HOLDERS, SAMPLED = 8, 4, 2
"""Candidates of one phase."""
PAIRS_OF = 3
"""Of each phase the best so many are looked at as pairs."""
CHANCE_SLACK = 0.02
"""Chances that differ by less count as the same: then cost decides."""
TIE = 0.02
TIE_S = 5e-4
"""Costs this close count as the same: then the one that was used longest ago."""
DECODE_WEIGHT = 0.25
"""A second of decoding against a second before the first token."""
OTHERS_WEIGHT = 0.5
"""A second that somebody else waits against one of one's own."""
QUEUE_MAX = 4.0
"""Future arrivals that a second of work delays, at most: rho / (1 - rho) in a queue."""


class Request(NamedTuple):
    want: Want
    is_last_token: bool
    """No decode phase."""
    avoid: frozenset[WorkerId]
    fingerprint: str
    """Of the workers that computed the sequence so far; empty: nobody."""
    matched: Callable[[str, int], Matched]
    """(fingerprint, block_tokens) -> leading tokens in each worker's prefix cache."""
    adapter_at: frozenset[WorkerId] | None = None
    """Where its adapter is loaded; None: it needs none."""
    suspended: frozenset[WorkerId] = frozenset()
    """Workers that get nothing while others can."""
    kept: frozenset[WorkerId] = frozenset()
    """Workers whose last room is for others, see `router.decisions.placement.room`."""


class _First(NamedTuple):
    """One worker for the prompt."""

    worker: Worker
    cached_tokens: int
    prefill: Prefill
    chance: float
    cost_s: float


class _Second(NamedTuple):
    """One worker for decoding, whoever computes the prompt."""

    decoding: float
    """Sequences that decode there, or will."""
    marginal_s: float
    """That this one adds to a step, in the middle of its answer."""
    others_s: float
    """That it makes others wait."""


class _Option(NamedTuple):
    first: _First
    decode: Worker | None
    """None: both phases on one worker."""
    raw_tpot_s: float
    tpot_s: float
    exposed_s: float
    chance: float
    """That both objectives hold."""
    score: float
    """The same, less what others lose."""
    cost_s: float

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.first.worker,) if self.decode is None else (self.first.worker, self.decode)


class SloPlacer:
    def __init__(
        self, predictor: Predictor, *, disaggregate: bool, fallback: bool, any_role: bool, rng: Random
    ) -> None:
        """`any_role`: a worker may run a whole sequence whatever its role."""
        self._predictor = predictor
        self._disaggregate, self._fallback, self._any_role = disaggregate, fallback, any_role
        self._rng = rng

    def place(self, request: Request, cluster: ClusterView, *, now_s: float) -> Placement | NoPlace:
        look = _Look(request, cluster, self._predictor, self._rng, now_s)
        everyone = cluster.usable
        if not everyone:
            return NoPlace("no worker takes new sequences")
        if not any(map(look.fits, everyone)):
            return NoPlace("longer than any worker can hold", is_final=True)
        look.leave_out(request.suspended, everyone)
        look.keep(request.kept)
        if not self._disaggregate:
            return self._choose(look, look.wholes(everyone), "no worker has room")
        if cluster.has_pairs:
            found = self._pair_or_one(request, look, cluster)
            if isinstance(found, Placement) or any(map(look.fits, cluster.prefill_pool)):
                return found
        elif cluster.is_all_aggregated:
            return self._choose(look, look.wholes(everyone), "no worker has room")
        if not self._fallback:
            lacking = "decode" if cluster.prefill_pool else "prefill"
            return NoPlace(f"no {lacking} worker to pair with")
        return self._choose(look, look.wholes(everyone), "no worker has room", is_fallback=True)

    def _pair_or_one(self, request: Request, look: "_Look", cluster: ClusterView) -> Placement | NoPlace:
        options: list[_Option] = []
        missing = "no worker has room"
        if not request.is_last_token:
            options, missing = look.pairs(cluster)
        if self._any_role:
            options += look.wholes_near() if options else look.wholes(cluster.usable)
        elif request.is_last_token:
            options = look.wholes(cluster.prefill_pool)
        else:
            options += look.wholes(cluster.aggregated_pool)
        return self._choose(look, options, missing)

    def _choose(
        self, look: "_Look", options: list[_Option], missing: str, *, is_fallback: bool = False
    ) -> Placement | NoPlace:
        if not options:
            return NoPlace(missing)
        return self._answer(_best(options), look, options, is_fallback=is_fallback)

    def _answer(
        self, best: _Option, look: "_Look", options: Sequence[_Option], *, is_fallback: bool
    ) -> Placement:
        first, prefill = best.first, best.first.prefill
        predicted = Predicted(prefill, best.raw_tpot_s, best.tpot_s, best.exposed_s)
        ttft_sigma = self._predictor.look(first.worker).ttft_sigma
        forecast = Forecast(
            wait_s=prefill.wait_s,
            load_s=prefill.load_s + prefill.bring_s,
            compute_s=prefill.compute_s,
            hop_s=prefill.hop_s,
            exposed_transfer_s=best.exposed_s,
            tpot_s=best.tpot_s,
            seen_tpot_s=look.seen_tpot_s(best.tpot_s, best.exposed_s),
            ttft_sigma=ttft_sigma,
            tpot_sigma=self._predictor.look(best.decode or first.worker).tpot_sigma,
            meets=best.chance,
            cost_s=best.cost_s,
        )
        decode = None if best.decode is None else look.view(best.decode)
        reason = _reason(best, options, forecast)
        return Placement(
            look.view(first.worker), decode, reason, is_fallback, forecast=forecast, predicted=predicted
        )


def _best(options: Sequence[_Option]) -> _Option:
    least = max(option.score for option in options) - CHANCE_SLACK
    likely = [option for option in options if option.score >= least]
    limit_s = min(option.cost_s for option in likely) * (1 + TIE) + TIE_S
    tied = [option for option in likely if option.cost_s <= limit_s]
    if len(tied) == 1:
        return tied[0]
    return min(tied, key=_standing)


def _standing(option: _Option) -> tuple[int, float, WorkerId]:
    workers = option.workers
    return (
        sum(w.in_flight.sequences for w in workers),
        max(w.last_placed_s for w in workers),
        workers[0].worker_id,
    )


def _reason(best: _Option, options: Sequence[_Option], forecast: Forecast) -> str:
    first = best.first
    cached = f", {first.cached_tokens} tokens cached" if first.cached_tokens else ""
    transfer = f" + transfer {best.exposed_s:.3f}" if best.decode is not None else ""
    others = [o for o in options if (o.decode is None) != (best.decode is None)]
    other = min(others, key=lambda o: o.cost_s, default=None)
    beside = "" if other is None else f"; {_kind(other)} {other.chance:.0%} at {other.cost_s:.3f} s"
    return (
        f"{_kind(best)}: TTFT {forecast.ttft_s:.3f} s (wait {forecast.wait_s:.3f}, compute "
        f"{forecast.compute_s:.3f}{cached}){transfer}, TPOT {forecast.tpot_s:.4f} s, "
        f"{forecast.meets:.0%} at {forecast.cost_s:.3f} s{beside}"
    )


def _kind(option: _Option) -> str:
    return "one worker" if option.decode is None else "pair"


class _Look:
    """One decision."""

    def __init__(
        self, request: Request, cluster: ClusterView, predictor: Predictor, rng: Random, now_s: float
    ) -> None:
        self._request, self._cluster, self._predictor = request, cluster, predictor
        self._rng, self._now_s = rng, now_s
        want = request.want
        self._want = want
        self._output = predictor.lengths.expected(want.tokens_max)
        self._left_s = want.ttft_slo_s - want.waited_s if want.ttft_slo_s else 0.0
        self._most: list[Worker] | None = None
        self._left_out: frozenset[WorkerId] = frozenset()
        self._firsts: dict[WorkerId, _First] = {}
        self._seconds: dict[WorkerId, _Second] = {}
        self._tried: dict[tuple[WorkerId, WorkerId], _Option] = {}
        """Pairs."""
        self._near: list[Worker] = []
        """Who is good for one phase."""

    # --- who may ----------------------------------------------------------------------------------

    def fits(self, worker: Worker) -> bool:
        hello, tokens = worker.hello, self._want.tokens
        return tokens < hello.max_model_tokens and self._blocks(worker) <= hello.block_count

    def leave_out(self, suspended: frozenset[WorkerId], everyone: Sequence[Worker]) -> None:
        """Unless none of the others is large enough."""
        if suspended and any(self.fits(w) for w in everyone if w.worker_id not in suspended):
            self._left_out = suspended

    def keep(self, workers: frozenset[WorkerId]) -> None:
        """Even when they are all there are."""
        self._left_out |= workers

    def _blocks(self, worker: Worker) -> int:
        # One more than known: the place of the token that is sampled next.
        return blocks_for(self._want.tokens + 1, worker.hello.block_tokens)

    def has_room(self, worker: Worker) -> bool:
        return not worker.has_refused and self._blocks(worker) <= worker.free_blocks

    def _takes_prompt(self, worker: Worker) -> bool:
        may = worker.role.prefills and not worker.is_draining and not worker.has_refused
        return may and self.fits(worker) and worker.worker_id not in self._left_out

    def _takes_decode(self, worker: Worker) -> bool:
        return worker.role.decodes and self._takes_both(worker)

    def _takes_both(self, worker: Worker) -> bool:
        may = not worker.is_draining and worker.worker_id not in self._left_out
        return may and self.fits(worker) and self.has_room(worker)

    def _rank(self, worker: Worker) -> int:
        """Lower first; a higher rank is used only when there is nothing else. A stream goes on with the
        weights that began it; who just failed comes after any other; who has not reported is unknown."""
        request = self._request
        is_foreign = request.fingerprint not in ("", worker.hello.fingerprint)
        is_stale = self._cluster.is_stale(worker, self._now_s)
        return 4 * is_foreign + 2 * (worker.worker_id in request.avoid) + is_stale

    def _candidates(
        self, pool: Sequence[Worker], may: Callable[[Worker], bool], busy: Callable[[Worker], float]
    ) -> list[Worker]:
        """The best rank's least busy, most cached, and some at random."""
        if len(pool) <= LEAST_BUSY + HOLDERS + SAMPLED:
            return self._best_rank([w for w in pool if may(w)])
        found: dict[WorkerId, Worker] = {}
        lesser: list[Worker] = []
        for worker in sorted(pool, key=busy):
            if may(worker):
                if self._rank(worker):
                    lesser.append(worker)
                    continue
                found[worker.worker_id] = worker
                if len(found) == LEAST_BUSY:
                    break
        if not found:
            return self._best_rank(lesser)[: LEAST_BUSY + HOLDERS + SAMPLED]
        for worker in (*self._holders(), *self._rng.sample(pool, SAMPLED)):
            if worker.worker_id not in found and may(worker) and not self._rank(worker):
                found[worker.worker_id] = worker
        return list(found.values())

    def _best_rank(self, able: list[Worker]) -> list[Worker]:
        if not able:
            return able
        ranks = [self._rank(w) for w in able]
        best = min(ranks)
        return [w for w, rank in zip(able, ranks, strict=True) if rank == best]

    def _holders(self) -> list[Worker]:
        """Of any role: those that hold most of the prompt."""
        if self._most is None:
            held: dict[WorkerId, int] = {}
            for kind in self._cluster.kinds:
                held.update(self._request.matched(*kind))
            ids = nlargest(2 * HOLDERS, held, key=held.__getitem__)
            self._most = [w for w in map(self._cluster.get, ids) if w is not None]
        return self._most

    # --- what it would take -----------------------------------------------------------------------

    def _first(self, worker: Worker) -> _First:
        found = self._firsts.get(worker.worker_id)
        if found is None:
            found = self._firsts[worker.worker_id] = self._judged(worker)
        return found

    def _lacks_adapter(self, worker: Worker) -> bool:
        at = self._request.adapter_at
        return at is not None and worker.worker_id not in at

    def _judged(self, worker: Worker) -> _First:
        hello, want = worker.hello, self._want
        cached = self._request.matched(hello.fingerprint, hello.block_tokens).get(worker.worker_id, 0)
        loads_adapter = self._lacks_adapter(worker)
        prefill = self._predictor.prefill(worker, want, cached, now_s=self._now_s)
        if loads_adapter:
            prefill = prefill._replace(load_s=self._predictor.adapter_s)
        odds = 1.0
        if want.ttft_slo_s:
            odds = chance(self._left_s, prefill.ttft_s, self._predictor.look(worker).ttft_sigma)
        rho = worker.rho(self._now_s)
        delayed = min(QUEUE_MAX, rho / (1.0 - rho)) + worker.backlog.count
        delayed -= worker.backlog.ahead(want.priority, want.tokens).prompts
        cost_s = prefill.ttft_s + OTHERS_WEIGHT * prefill.compute_s * delayed
        return _First(worker, cached, prefill, odds, cost_s)

    def seen_tpot_s(self, tpot_s: float, exposed_s: float) -> float:
        """As the client measures it, from its first token on."""
        return tpot_s + exposed_s / max(1.0, self._output - 1.0)

    def _decode(self, first: _First, worker: Worker, *, is_whole: bool) -> _Option:
        """With `worker` decoding what `first` prefills."""
        predictor, want, output = self._predictor, self._want, self._output
        prefill, now_s = first.prefill, self._now_s
        if self._request.is_last_token:
            return _Option(first, None, 0.0, 0.0, 0.0, first.chance, first.chance, first.cost_s)
        raw_s = predictor.raw_tpot_s(
            worker,
            want.tokens,
            starts_in_s=prefill.ttft_s,
            output_tokens=output,
            now_s=now_s,
            slo_s=want.tpot_slo_s,
        )
        tpot_s = raw_s * predictor.look(worker).tpot_factor
        exposed_s = 0.0
        if not is_whole:
            # Both workers hear at once, so the decode worker loads while the other computes.
            adapter_s = predictor.adapter_s if self._lacks_adapter(worker) else 0.0
            hello = worker.hello
            held = self._request.matched(hello.fingerprint, hello.block_tokens).get(worker.worker_id, 0)
            exposed_s = predictor.exposed_s(first.worker, worker, want, held, prefill)
            exposed_s += max(0.0, adapter_s - prefill.ttft_s)
        odds = first.chance
        if want.tpot_slo_s:
            seen_s = self.seen_tpot_s(tpot_s, exposed_s)
            odds *= chance(want.tpot_slo_s, seen_s, predictor.look(worker).tpot_sigma)
        second = self._seconds.get(worker.worker_id) or self._beside(worker)
        others_s, marginal_s = second.others_s, second.marginal_s
        if is_whole:
            others_s += prefill.compute_s * second.decoding
        cost_s = first.cost_s + DECODE_WEIGHT * (output * tpot_s + exposed_s) + OTHERS_WEIGHT * others_s
        lost = self._lost(worker, tpot_s, marginal_s, prefill.compute_s if is_whole else 0.0)
        chosen = None if is_whole else worker
        return _Option(first, chosen, raw_s, tpot_s, exposed_s, odds, odds - lost, cost_s)

    def _beside(self, worker: Worker) -> _Second:
        output, costs = self._output, worker.speed.costs
        decoding = worker.decode_count + worker.others_decodes
        marginal_s = costs.decode_s + costs.context_token_s * (self._want.tokens + output / 2)
        rho = worker.rho(self._now_s)
        delayed = decoding + worker.backlog.count + min(QUEUE_MAX, rho / (1.0 - rho))
        others_s = marginal_s * output * delayed / worker.speed.tokens_per_step
        found = self._seconds[worker.worker_id] = _Second(decoding, marginal_s, others_s)
        return found

    def _pair(self, first: _First, worker: Worker) -> _Option:
        key = first.worker.worker_id, worker.worker_id
        found = self._tried.get(key)
        if found is None:
            found = self._tried[key] = self._decode(first, worker, is_whole=False)
        return found

    def _lost(self, worker: Worker, tpot_s: float, marginal_s: float, prompt_s: float) -> float:
        """Chances that those who decode there lose, together: each has half of its answer before it."""
        if not worker.tpot_slos:
            return 0.0
        ahead = self._predictor.look(worker)
        sigma, factor = ahead.tpot_sigma, ahead.tpot_factor / worker.speed.tokens_per_step
        before_s = max(1e-6, tpot_s - marginal_s * factor)
        after_s = tpot_s + prompt_s / max(1.0, self._predictor.lengths.mean)
        lost = 0.0
        for slo_s, count in worker.tpot_slos.items():
            lost += count * (chance(slo_s, before_s, sigma) - chance(slo_s, after_s, sigma))
        return max(0.0, lost / 2)

    def pairs(self, cluster: ClusterView) -> tuple[list[_Option], str]:
        """The best few, or why there are none."""
        decodes = self._candidates(cluster.decode_pool, self._takes_decode, DECODE_BUSY)
        if not decodes:
            return [], "no decode worker has room"
        reachable = {w.hello.fingerprint for w in decodes}
        may = self._takes_prompt
        prefills = self._candidates(cluster.prefill_pool, may, PREFILL_BUSY)
        firsts = [self._first(w) for w in prefills if w.hello.fingerprint in reachable]
        if not firsts:
            return [], "no prefill worker takes more"
        firsts = _few(firsts)
        seconds = self._few_decodes(firsts[0], decodes)
        self._near = [*(first.worker for first in firsts), *seconds]
        return [
            self._pair(first, worker)
            for first in firsts
            for worker in seconds
            if _may_pair(first.worker, worker)
        ], "no worker has room"

    def _few_decodes(self, first: _First, decodes: Sequence[Worker]) -> list[Worker]:
        tried = [self._pair(first, worker) for worker in decodes]
        tried.sort(key=lambda o: (-ceil(o.score / CHANCE_SLACK), o.cost_s))
        fingerprints = dict.fromkeys(o.decode.hello.fingerprint for o in tried if o.decode is not None)
        if len(fingerprints) == 1:
            return [o.decode for o in tried[:PAIRS_OF] if o.decode is not None]
        return [o.decode for o in tried if o.decode is not None]

    def wholes(self, pool: Sequence[Worker]) -> list[_Option]:
        def may(worker: Worker) -> bool:
            return worker.role in roles and self._takes_both(worker)

        roles = {w.role for w in pool}
        firsts = [self._first(worker) for worker in self._candidates(pool, may, _busy)]
        return [self._decode(first, first.worker, is_whole=True) for first in _few(firsts, 2 * PAIRS_OF)]

    def wholes_near(self) -> list[_Option]:
        """With both phases on one of those that are best for one phase, or that hold most of the prompt."""
        near = {w.worker_id: w for w in (*self._near, *self._holders()) if self._takes_both(w)}
        firsts = [self._first(worker) for worker in self._best_rank(list(near.values()))]
        return [self._decode(first, first.worker, is_whole=True) for first in _few(firsts, 2 * PAIRS_OF)]

    def view(self, worker: Worker) -> WorkerView:
        return self._cluster.view(
            worker, self._want.tokens, self._request.avoid, self._request.fingerprint, self._now_s
        )


DECODE_BUSY = attrgetter("decode_count")
PREFILL_BUSY = attrgetter("backlog.tokens")


def _busy(worker: Worker) -> float:
    return worker.in_flight.tokens + SEQUENCE_TOKENS * worker.in_flight.sequences


def _few(firsts: list[_First], count: int = PAIRS_OF) -> list[_First]:
    if len(firsts) <= count:
        return firsts
    return sorted(firsts, key=lambda f: (-ceil(f.chance / CHANCE_SLACK), f.cost_s))[:count]


def _may_pair(prefill: Worker, decode: Worker) -> bool:
    """Never one with itself, and never two of role aggregated: nothing is gained between equals, and two that
    decode for each other, both full, would each wait for the other's prefill."""
    if prefill is decode or prefill.hello.fingerprint != decode.hello.fingerprint:
        return False
    return prefill.role is not Role.AGGREGATED or decode.role is not Role.AGGREGATED
