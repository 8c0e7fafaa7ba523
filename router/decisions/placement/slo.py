"""Placement by predicted time: a prefill and a decode worker, or one worker for both phases.

Placements are ranked by the probability that the request's objectives hold, less what other requests on the
decode worker lose by it, and then by cost. Cost is the seconds that the request takes and makes others wait.
A cached prefix, a loaded adapter, siblings in flight and a short queue all count as seconds, so none of them
is a special case.

A decision considers a bounded number of workers: those that hold most of the prompt, the least loaded ones,
and a few at random. The phases are predicted separately, and only the best few of each are combined into
pairs.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from baton.core.ids import WorkerId
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerSnapshot
from router.decisions.placement.interface import (
    NoPlace,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    PolicyTools,
)
from router.decisions.placement.slo_candidates import (
    CandidateFinder,
    aggregated_load,
    decode_load,
    may_pair,
    prefill_load,
)
from router.decisions.prediction.forecast import Forecast, PrefillForecast
from router.decisions.prediction.model import attainment_probability
from router.decisions.prediction.outlook import Outlook

PAIRS_OF = 3
"""The number of best workers of each phase that are combined into pairs."""
PROBABILITY_SLACK = 0.02
"""Probabilities that differ by less count as equal, and cost decides."""
TIE = 0.02
TIE_S = 5e-4
"""Costs this close count as equal, and the least recently used worker is taken."""
DECODE_WEIGHT = 0.25
"""Weight of a second of decoding, relative to a second before the first token."""
OTHERS_WEIGHT = 0.5
"""Weight of a second that other requests wait, relative to a second of this one."""
QUEUE_MAX = 4.0
"""Future arrivals that a second of work delays, at most: busy / (1 - busy) in a queue."""


class _PrefillOption(NamedTuple):
    """One worker that would prefill the prompt."""

    worker: WorkerSnapshot
    outlook: Outlook
    cached_tokens: int
    prefill: PrefillForecast
    probability: float
    cost_s: float


class _DecodeEffect(NamedTuple):
    """The effect of the sequence on one decode worker, whichever worker prefills."""

    outlook: Outlook
    decoding: float
    """Number of sequences that decode there or will."""
    marginal_s: float
    """Seconds that the sequence adds to a step in the middle of its answer."""
    others_s: float
    """Seconds that it makes other sequences wait."""


class _Option(NamedTuple):
    first: _PrefillOption
    decode: WorkerSnapshot | None
    """The decode worker; None if the prefill worker runs both phases."""
    raw_tpot_s: float
    tpot_s: float
    exposed_s: float
    probability: float
    """Probability that both objectives hold."""
    score: float
    """`probability` less what other sequences lose."""
    cost_s: float

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        return (self.first.worker,) if self.decode is None else (self.first.worker, self.decode)


class SloPolicy:
    """The default `PlacementPolicy`."""

    uses_prefix = True

    def __init__(self, tools: PolicyTools) -> None:
        self._tools = tools

    def place(self, request: PlacementRequest, snapshot: ClusterSnapshot) -> Placement | NoPlace:
        config, usable = self._tools.config, snapshot.pools.usable
        decision = _Decision(request, snapshot, self._tools)
        finder = decision.finder
        if not usable:
            return NoPlace("no worker takes new sequences")
        if not any(map(finder.fits, usable)):
            return NoPlace("the sequence is longer than any worker can hold", is_final=True)
        if not config.disaggregate:
            return decision.choose(decision.aggregated(usable), "no worker has enough free blocks")
        if snapshot.has_pairs:
            found = self._pair_or_one(decision, request, snapshot)
            if isinstance(found, Placement) or any(map(finder.fits, snapshot.pools.prefill)):
                return found
        elif snapshot.is_all_aggregated:
            return decision.choose(decision.aggregated(usable), "no worker has enough free blocks")
        if not config.fallback_to_other_pool:
            lacking = "decode" if snapshot.pools.prefill else "prefill"
            return NoPlace(f"there is no {lacking} worker of a compatible fingerprint")
        return decision.choose(
            decision.aggregated(usable), "no worker has enough free blocks", is_fallback=True
        )

    def _pair_or_one(
        self, decision: "_Decision", request: PlacementRequest, snapshot: ClusterSnapshot
    ) -> Placement | NoPlace:
        options: list[_Option] = []
        missing = "no worker has enough free blocks"
        if not request.is_last_token:
            options, missing = decision.pairs()
        if self._tools.config.any_role:
            more = decision.aggregated_near() if options else decision.aggregated(snapshot.pools.usable)
            options += more
        elif request.is_last_token:
            options = decision.aggregated(snapshot.pools.prefill)
        else:
            options += decision.aggregated(snapshot.pools.aggregated)
        return decision.choose(options, missing)


def slo(tools: PolicyTools) -> PlacementPolicy:
    return SloPolicy(tools)


class _Decision:
    """One request on one snapshot. Predictions for a worker are computed once."""

    def __init__(self, request: PlacementRequest, snapshot: ClusterSnapshot, tools: PolicyTools) -> None:
        self._request, self._snapshot, self._predictor = request, snapshot, tools.predictor
        self._needs, self._now_s = request.needs, snapshot.now_s
        self.finder = CandidateFinder(request, snapshot, tools.rng)
        needs = request.needs
        self._output = tools.predictor.lengths.expected(needs.tokens_max)
        self._left_s = needs.ttft_slo_s - needs.waited_s if needs.ttft_slo_s else 0.0
        self._prefills: dict[WorkerId, _PrefillOption] = {}
        self._effects: dict[WorkerId, _DecodeEffect] = {}
        self._tried: dict[tuple[WorkerId, WorkerId], _Option] = {}
        """Pairs that were evaluated."""
        self._near: list[WorkerSnapshot] = []
        """Workers that are among the best for one phase."""

    # --- predictions -----------------------------------------------------------------------

    def _prefill(self, worker: WorkerSnapshot) -> _PrefillOption:
        found = self._prefills.get(worker.worker_id)
        if found is None:
            found = self._prefills[worker.worker_id] = self._judge_prefill(worker)
        return found

    def _lacks_adapter(self, worker: WorkerSnapshot) -> bool:
        at = self._request.adapter_at
        return at is not None and worker.worker_id not in at

    def _judge_prefill(self, worker: WorkerSnapshot) -> _PrefillOption:
        needs, predictor, inputs = self._needs, self._predictor, worker.prediction
        cached = self._request.cached_tokens(worker)
        prefill = predictor.prefill(worker, needs, cached, now_s=self._now_s)
        if self._lacks_adapter(worker):
            prefill = prefill._replace(load_s=predictor.adapter_s)
        outlook = predictor.outlook(worker)
        probability = 1.0
        if needs.ttft_slo_s:
            probability = attainment_probability(self._left_s, prefill.ttft_s, outlook.ttft_sigma)
        busy = inputs.busy_share(self._now_s)
        delayed = min(QUEUE_MAX, busy / (1.0 - busy)) + inputs.backlog.prompts
        delayed -= inputs.backlog.ahead(needs.priority, needs.tokens).prompts
        cost_s = prefill.ttft_s + OTHERS_WEIGHT * prefill.compute_s * delayed
        return _PrefillOption(worker, outlook, cached, prefill, probability, cost_s)

    def _decode(self, first: _PrefillOption, worker: WorkerSnapshot, *, is_aggregated: bool) -> _Option:
        """Judge `worker` decoding what `first` prefills."""
        predictor, needs, output = self._predictor, self._needs, self._output
        prefill, now_s = first.prefill, self._now_s
        if self._request.is_last_token:
            return _Option(first, None, 0.0, 0.0, 0.0, first.probability, first.probability, first.cost_s)
        raw_s = predictor.raw_tpot_s(
            worker,
            needs.tokens,
            starts_in_s=prefill.ttft_s,
            output_tokens=output,
            now_s=now_s,
            slo_s=needs.tpot_slo_s,
        )
        effect = self._effects.get(worker.worker_id) or self._judge_effect(worker)
        outlook = effect.outlook
        tpot_s = raw_s * outlook.tpot_factor
        exposed_s = 0.0
        if not is_aggregated:
            # Both workers start at once, so the decode worker loads the adapter while the other one computes.
            adapter_s = predictor.adapter_s if self._lacks_adapter(worker) else 0.0
            held = self._request.cached_tokens(worker)
            exposed_s = predictor.exposed_s(first.worker, worker, needs, held, prefill)
            exposed_s += max(0.0, adapter_s - prefill.ttft_s)
        probability = first.probability
        if needs.tpot_slo_s:
            seen_s = tpot_s + exposed_s / max(1.0, output - 1.0)
            probability *= attainment_probability(needs.tpot_slo_s, seen_s, outlook.tpot_sigma)
        others_s = effect.others_s
        if is_aggregated:
            others_s += prefill.compute_s * effect.decoding
        cost_s = first.cost_s + DECODE_WEIGHT * (output * tpot_s + exposed_s) + OTHERS_WEIGHT * others_s
        lost = self._lost(worker, effect, tpot_s, prefill.compute_s if is_aggregated else 0.0)
        chosen = None if is_aggregated else worker
        return _Option(first, chosen, raw_s, tpot_s, exposed_s, probability, probability - lost, cost_s)

    def _judge_effect(self, worker: WorkerSnapshot) -> _DecodeEffect:
        output, inputs = self._output, worker.prediction
        costs = inputs.costs
        decoding = inputs.decode_count + inputs.others_decodes
        marginal_s = costs.one_more_s(decoding) + costs.context_token_s * (self._needs.tokens + output / 2)
        busy = inputs.busy_share(self._now_s)
        delayed = decoding + inputs.backlog.prompts + min(QUEUE_MAX, busy / (1.0 - busy))
        others_s = marginal_s * output * delayed / inputs.tokens_per_step
        outlook = self._predictor.outlook(worker)
        found = self._effects[worker.worker_id] = _DecodeEffect(outlook, decoding, marginal_s, others_s)
        return found

    def _lost(self, worker: WorkerSnapshot, effect: _DecodeEffect, tpot_s: float, prompt_s: float) -> float:
        """Return the probability that running sequences lose by it, summed. Each is taken to be half done."""
        inputs = worker.prediction
        if not inputs.tpot_slos:
            return 0.0
        outlook = effect.outlook
        sigma, factor = outlook.tpot_sigma, outlook.tpot_factor / inputs.tokens_per_step
        before_s = max(1e-6, tpot_s - effect.marginal_s * factor)
        after_s = tpot_s + prompt_s / max(1.0, self._predictor.lengths.mean)
        lost = 0.0
        for slo_s, count in inputs.tpot_slos:
            before = attainment_probability(slo_s, before_s, sigma)
            lost += count * (before - attainment_probability(slo_s, after_s, sigma))
        return max(0.0, lost / 2)

    # --- options ----------------------------------------------------------------------

    def _pair(self, first: _PrefillOption, worker: WorkerSnapshot) -> _Option:
        key = first.worker.worker_id, worker.worker_id
        found = self._tried.get(key)
        if found is None:
            found = self._tried[key] = self._decode(first, worker, is_aggregated=False)
        return found

    def pairs(self) -> tuple[list[_Option], str]:
        """Return the best few pairs, and the reason in case there are none."""
        finder, pools = self.finder, self._snapshot.pools
        decodes = finder.candidates(pools.decode, finder.takes_decode, decode_load)
        if not decodes:
            return [], "no decode worker has enough free blocks"
        reachable = {w.facts.fingerprint for w in decodes}
        prefills = finder.candidates(pools.prefill, finder.takes_prompt, prefill_load)
        firsts = [self._prefill(w) for w in prefills if w.facts.fingerprint in reachable]
        if not firsts:
            return [], "every prefill worker refuses new sequences"
        firsts = _few(firsts)
        seconds = self._few_decodes(firsts[0], decodes)
        self._near = [*(first.worker for first in firsts), *seconds]
        return [
            self._pair(first, worker)
            for first in firsts
            for worker in seconds
            if may_pair(first.worker, worker)
        ], "no worker has enough free blocks"

    def _few_decodes(self, first: _PrefillOption, decodes: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
        tried = [self._pair(first, worker) for worker in decodes]
        tried.sort(key=lambda o: (-ceil(o.score / PROBABILITY_SLACK), o.cost_s))
        found = [o.decode for o in tried if o.decode is not None]
        return found[:PAIRS_OF] if len({w.facts.fingerprint for w in found}) == 1 else found

    def aggregated(self, pool: Sequence[WorkerSnapshot]) -> list[_Option]:
        """Return the best few workers of the pool for both phases."""
        finder, roles = self.finder, {w.facts.role for w in pool}

        def may(worker: WorkerSnapshot) -> bool:
            return worker.facts.role in roles and finder.takes_both(worker)

        found = finder.candidates(pool, may, aggregated_load)
        return self._on_one([self._prefill(worker) for worker in found])

    def aggregated_near(self) -> list[_Option]:
        """Return options on one worker, among the best of each phase and those that hold most of the
        prompt."""
        finder = self.finder
        near = {w.worker_id: w for w in (*self._near, *finder.holders()) if finder.takes_both(w)}
        return self._on_one([self._prefill(worker) for worker in finder.best_rank(list(near.values()))])

    def _on_one(self, firsts: list[_PrefillOption]) -> list[_Option]:
        return [self._decode(first, first.worker, is_aggregated=True) for first in _few(firsts, 2 * PAIRS_OF)]

    # --- choice -------------------------------------------------------------------------------

    def choose(
        self, options: list[_Option], missing: str, *, is_fallback: bool = False
    ) -> Placement | NoPlace:
        if not options:
            return NoPlace(missing)
        best = _best(options)
        first = best.first
        predicted = self._predictor.prediction(
            first.worker,
            best.decode or first.worker,
            self._needs,
            first.prefill,
            best.raw_tpot_s,
            best.tpot_s,
            best.exposed_s,
        )
        forecast = self._predictor.forecast(
            first.worker, best.decode, self._needs, predicted, meets=best.probability, cost_s=best.cost_s
        )
        reason = _reason(best, options, forecast)
        return Placement(first.worker, best.decode, reason, is_fallback, forecast, predicted)


def _best(options: Sequence[_Option]) -> _Option:
    least = max(option.score for option in options) - PROBABILITY_SLACK
    likely = [option for option in options if option.score >= least]
    limit_s = min(option.cost_s for option in likely) * (1 + TIE) + TIE_S
    tied = [option for option in likely if option.cost_s <= limit_s]
    if len(tied) == 1:
        return tied[0]
    return min(tied, key=_standing)


def _standing(option: _Option) -> tuple[int, float, WorkerId]:
    workers = option.workers
    return (
        sum(w.load.sequences for w in workers),
        max(w.load.last_placed_s for w in workers),
        workers[0].worker_id,
    )


def _few(firsts: list[_PrefillOption], count: int = PAIRS_OF) -> list[_PrefillOption]:
    if len(firsts) <= count:
        return firsts
    return sorted(firsts, key=lambda f: (-ceil(f.probability / PROBABILITY_SLACK), f.cost_s))[:count]


def _reason(best: _Option, options: Sequence[_Option], forecast: Forecast) -> str:
    first = best.first
    cached = f", {first.cached_tokens} tokens cached" if first.cached_tokens else ""
    transfer = f" + transfer {best.exposed_s:.3f}" if best.decode is not None else ""
    others = [o for o in options if (o.decode is None) != (best.decode is None)]
    other = min(others, key=lambda o: o.cost_s, default=None)
    beside = (
        ""
        if other is None
        else f"; {_kind(other)} would hold with {other.probability:.0%}, cost {other.cost_s:.3f} s"
    )
    return (
        f"{_kind(best)}: TTFT {forecast.ttft_s:.3f} s (wait {forecast.wait_s:.3f}, compute "
        f"{forecast.compute_s:.3f}{cached}){transfer}, TPOT {forecast.tpot_s:.4f} s, "
        f"objectives hold with {forecast.meets:.0%}, cost {forecast.cost_s:.3f} s{beside}"
    )


def _kind(option: _Option) -> str:
    return "aggregated" if option.decode is None else "disaggregated"
