"""The predictor: how long one sequence will take at one worker or at a pair. It learns online.

The analytic model (`model`) predicts waiting, computing and decoding. Each of them is corrected separately by
what happened on that worker (see `correction`).
"""

from collections.abc import Mapping
from math import exp, log

from baton.core.costs import PhaseTimings
from baton.core.ids import WorkerId
from baton.core.messages import SequenceJoined
from router.decisions.cluster.prediction_inputs import PredictionInputs
from router.decisions.cluster.snapshot import WorkerFacts, WorkerSnapshot
from router.decisions.prediction import model
from router.decisions.prediction.calibration import AttainmentRecords
from router.decisions.prediction.corrections import FleetCorrections, WorkerCorrections
from router.decisions.prediction.distribution import SIGMA_MIN, ErrorsByKind
from router.decisions.prediction.forecast import (
    TPOT_SIGMA,
    Forecast,
    Prediction,
    PrefillForecast,
    SequenceNeeds,
)
from router.decisions.prediction.links import Links, OutputLengths
from router.decisions.prediction.outlook import Outlook
from router.decisions.prediction.prompt_steps import prompt_steps
from router.decisions.prediction.regression import TIME_MIN_S
from router.decisions.prediction.skill import Smoothed
from router.decisions.prediction.status import ClassCalibration

TTFT_TOLERANCE_S, TPOT_TOLERANCE_S = 0.05, 0.005
"""Errors this small do not count, since no placement depends on them."""
JUDGED_WEIGHT, SEEN_MIN = 0.03, 30
"""Least weight of the newest error in whether predictions are trusted, and how many must have been seen."""
HOP_WEIGHT = 0.1
WAIT_FLOOR_S = 0.005
"""A wait is compared with its prediction when either is longer."""
TPOT_TOKENS_MIN = 8
"""Shorter answers are not compared, since they say little about TPOT."""
FLEETS_MAX = 64
NOTHING_HELD = 0, 0.0
"""The count and share of a class of which nothing was seen."""
STORE_LOAD_GAIN = 0.97
"""Workers load blocks only where that saves time by this margin, and predictions follow the same rule."""
ADAPTER_FIRST_S, ADAPTER_WEIGHT = 0.5, 0.2


def _z(predicted_s: float, actual_s: float, sigma: float) -> float:
    """Return ln(actual / predicted) in units of the spread that was expected of it."""
    return log(max(actual_s, TIME_MIN_S) / max(predicted_s, TIME_MIN_S)) / max(sigma, SIGMA_MIN)


class Predictor:
    def __init__(self, *, error_max: float) -> None:
        """`error_max`: mean relative error of TTFT, over the fleet, above which predictions that say no more
        than a constant are not trusted; they are again below three quarters of it. Infinite: always."""
        self.links = Links()
        self.lengths = OutputLengths()
        self.adapter_s = ADAPTER_FIRST_S
        """Smoothed seconds of loading an adapter."""
        self.fallback_count = 0
        self.ttft_errors, self.tpot_errors = ErrorsByKind(by_size=True), ErrorsByKind(by_size=False)
        """Errors in units of the spreads that were expected of them, over all workers."""
        self.attainments = AttainmentRecords()
        self._error_max = error_max
        self._fleets: dict[str, FleetCorrections] = {}
        self._workers: dict[WorkerId, WorkerCorrections] = {}
        self._outlooks: dict[WorkerId, tuple[PredictionInputs, Outlook]] = {}
        """Each worker's outlook, with the inputs that it was made from."""
        self._excess = Smoothed(JUDGED_WEIGHT)
        self.is_trusted = True

    def corrections_of(self, worker_id: WorkerId) -> WorkerCorrections:
        found = self._workers.get(worker_id)
        if found is None:
            found = self._workers[worker_id] = WorkerCorrections()
        return found

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(worker_id, None)
        self._outlooks.pop(worker_id, None)

    def _fleet(self, facts: WorkerFacts) -> FleetCorrections:
        found = self._fleets.get(facts.fingerprint)
        if found is None:
            if len(self._fleets) >= FLEETS_MAX:
                del self._fleets[next(iter(self._fleets))]
            found = self._fleets[facts.fingerprint] = FleetCorrections()
        return found

    # --- predictions ------------------------------------------------------------------------------

    def outlook(self, worker: WorkerSnapshot) -> Outlook:
        """Return what follows from the worker alone. It is computed once per change of the worker."""
        found = self._outlooks.get(worker.worker_id)
        if found is not None and found[0] is worker.prediction:
            return found[1]
        made = self._new_outlook(worker)
        self._outlooks[worker.worker_id] = worker.prediction, made
        return made

    def _new_outlook(self, worker: WorkerSnapshot) -> Outlook:
        facts, inputs = worker.facts, worker.prediction
        learnt, fleet = self.corrections_of(worker.worker_id), self._fleet(facts)
        costs = inputs.costs
        decoding = inputs.decode_count - inputs.joining_count + inputs.others_decodes
        context = model.mean_context(inputs)
        beside_s = costs.decodes_s(decoding) + costs.context_token_s * context * decoding
        step_s, slo_s = costs.base_s + beside_s, inputs.strictest_tpot_slo_s
        prompts = prompt_steps(facts, costs, decoding=decoding, slo_s=slo_s, step_s=step_s)
        head = inputs.backlog.head()
        total, tpot = learnt.total, learnt.tpot
        return Outlook(
            decoding=decoding,
            mean_context=context,
            beside_s=beside_s,
            step_s=max(costs.floor_s, step_s),
            prompts=prompts,
            head_s=prompts.seconds(head.tokens, head.pairs),
            hop_s=learnt.hop_s if learnt.compute.count else fleet.hop_s,
            wait_factor=learnt.wait.factor(fleet.wait),
            compute_factor=learnt.compute.factor(fleet.compute),
            store_load_factor=learnt.store_load.factor(fleet.store_load),
            tpot_factor=tpot.factor(fleet.tpot),
            ttft_sigma=total.sigma if total.count >= 4 else max(total.sigma, fleet.total.sigma),
            tpot_sigma=tpot.sigma if tpot.count >= 4 else max(tpot.sigma, fleet.tpot.sigma),
        )

    def prefill(
        self, worker: WorkerSnapshot, needs: SequenceNeeds, cached_tokens: int, *, now_s: float
    ) -> PrefillForecast:
        """Predict the time until the first token, if the prompt were sent there now."""
        inputs, ahead = worker.prediction, self.outlook(worker)
        raw_compute_s = model.compute_s(ahead, cached_tokens, needs.tokens)
        loaded_tokens, raw_store_load_s = model.stored_s(worker, needs, cached_tokens)
        if loaded_tokens:
            rest_s = model.compute_s(ahead, cached_tokens + loaded_tokens, needs.tokens)
            if rest_s + raw_store_load_s < STORE_LOAD_GAIN * raw_compute_s:
                raw_compute_s = rest_s
            else:
                raw_store_load_s = 0.0
        raw_wait_s = model.wait_s(inputs, needs, raw_compute_s, ahead, now_s)
        wait_s = raw_wait_s * ahead.wait_factor
        return PrefillForecast(
            wait_s,
            raw_compute_s * ahead.compute_factor,
            ahead.hop_s,
            raw_wait_s,
            raw_compute_s,
            store_load_s=max(0.0, raw_store_load_s * ahead.store_load_factor - wait_s),
            raw_store_load_s=raw_store_load_s,
        )

    def raw_tpot_s(
        self,
        worker: WorkerSnapshot,
        tokens: int,
        *,
        starts_in_s: float,
        output_tokens: float,
        now_s: float,
        slo_s: float = 0.0,
    ) -> float:
        """TPOT, as the model says, of a sequence of `tokens` that begins to decode there in `starts_in_s`.

        Beside it decode those that do now, as far as they have not ended by then, and those on their way. The
        number goes back to what is usual, until its end, as fast as answers end; they are taken to be
        memoryless. Prompts that the worker computes itself lengthen some of its steps.
        """
        facts, inputs, ahead = worker.facts, worker.prediction, self.outlook(worker)
        costs, mean = inputs.costs, self.lengths.mean
        life_s = max(1e-6, mean * ahead.step_s / inputs.tokens_per_step)
        left, usual = exp(-max(0.0, starts_in_s) / life_s), inputs.usual_decodes
        if usual is None:
            count = ahead.decoding * left + inputs.joining_count
        else:
            now = ahead.decoding + inputs.joining_count
            count = usual + (now - usual) * left * model.mean_left(output_tokens / mean)
        count = min(count + 1.0, float(facts.batch_sequences_max))
        context = ahead.mean_context * (count - 1.0) + tokens + output_tokens / 2
        step_s = costs.compute_s(decodes=count, context_tokens=context)
        backlog = inputs.backlog
        position = backlog.pairs / backlog.tokens if backlog.tokens else 0.0
        longest_s = ahead.prompts.longest_s(position)
        behind_s = costs.prompts_s(backlog.tokens + inputs.others_tokens, backlog.pairs)
        # However many prompts come, no step has more of them beside it than a chunk, which the worker chooses
        # by the objectives of those that decode there.
        if own_slo_s := slo_s or facts.tpot_slo_s:
            own = prompt_steps(facts, costs, decoding=count, slo_s=own_slo_s, step_s=step_s)
            longest_s = min(longest_s, own.longest_s(position))
        busy_s = min(step_s / (1.0 - inputs.busy_share(now_s)), step_s + longest_s)
        share_s = min(behind_s / max(1.0, output_tokens), longest_s)
        return max(costs.floor_s, busy_s, step_s + share_s) / inputs.tokens_per_step

    def tpot_s(
        self,
        worker: WorkerSnapshot,
        tokens: int,
        *,
        starts_in_s: float,
        output_tokens: float,
        now_s: float,
        slo_s: float = 0.0,
    ) -> float:
        """`raw_tpot_s`, corrected by what happened on that worker."""
        raw_s = self.raw_tpot_s(
            worker,
            tokens,
            starts_in_s=starts_in_s,
            output_tokens=output_tokens,
            now_s=now_s,
            slo_s=slo_s,
        )
        return raw_s * self.outlook(worker).tpot_factor

    def exposed_s(
        self,
        source: WorkerSnapshot,
        target: WorkerSnapshot,
        needs: SequenceNeeds,
        held_tokens: int,
        prefill: PrefillForecast,
    ) -> float:
        """Predict the time from the first token until the sequence joins the decode worker's batch, which
        holds `held_tokens` already."""
        facts = source.facts
        token_bytes = facts.block_bytes / max(1, facts.block_tokens)
        total = max(0, needs.tokens - held_tokens) * token_bytes
        last = min(total, facts.step_tokens_max * token_bytes)
        return self.links.exposed_s(
            (facts.host, target.facts.host), total_bytes=total, last_bytes=last, hidden_s=prefill.compute_s
        )

    def predict(
        self,
        source: WorkerSnapshot,
        target: WorkerSnapshot | None,
        needs: SequenceNeeds,
        held: Mapping[WorkerId, int],
        *,
        now_s: float,
    ) -> Prediction:
        """Return the prediction for a placement. `held` are the leading tokens in each worker's cache.

        If `target` is None, `source` runs both phases.
        """
        prefill = self.prefill(source, needs, held.get(source.worker_id, 0), now_s=now_s)
        decode = target or source
        raw_s = self.raw_tpot_s(
            decode,
            needs.tokens,
            starts_in_s=prefill.ttft_s,
            output_tokens=self.lengths.expected(needs.tokens_max),
            now_s=now_s,
            slo_s=needs.tpot_slo_s,
        )
        exposed_s = 0.0
        if target is not None:
            exposed_s = self.exposed_s(source, target, needs, held.get(target.worker_id, 0), prefill)
        tpot_s = raw_s * self.outlook(decode).tpot_factor
        return self.prediction(source, decode, needs, prefill, raw_s, tpot_s, exposed_s)

    def prediction(
        self,
        source: WorkerSnapshot,
        decode: WorkerSnapshot,
        needs: SequenceNeeds,
        prefill: PrefillForecast,
        raw_tpot_s: float,
        tpot_s: float,
        exposed_s: float,
    ) -> Prediction:
        """Return predicted times of a placement with the errors that are expected of them."""
        plain_tpot_s = tpot_s + exposed_s / max(1.0, self.lengths.expected(needs.tokens_max) - 1.0)
        seen_tpot_s = self._fleet(decode.facts).seen_tpot.expected_s(plain_tpot_s)
        return Prediction(
            prefill,
            raw_tpot_s,
            tpot_s,
            exposed_s,
            plain_tpot_s,
            seen_tpot_s,
            self.outlook(source).ttft_sigma,
            self.ttft_errors.of(needs.slo_class, prefill.ttft_s),
            self.tpot_errors.of(needs.slo_class, seen_tpot_s),
            needs.slo_class,
        )

    def forecast(
        self,
        source: WorkerSnapshot,
        target: WorkerSnapshot | None,
        needs: SequenceNeeds,
        predicted: Prediction,
        *,
        meets: float | None = None,
        cost_s: float | None = None,
    ) -> Forecast:
        """What admission and metrics are told of a placement. `meets` and `cost_s` None: as they follow from
        the prediction alone, what others lose left out."""
        prefill, decode = predicted.prefill, target or source
        ttft_errors, tpot_errors = predicted.ttft_errors, predicted.tpot_errors
        if meets is None:
            meets = 1.0
            if needs.ttft_slo_s:
                left_s = needs.ttft_slo_s - needs.waited_s
                meets *= model.attainment_probability(left_s, prefill.ttft_s, predicted.ttft_sigma)
            if needs.tpot_slo_s:
                meets *= model.attainment_probability(
                    needs.tpot_slo_s, predicted.plain_tpot_s, self.outlook(decode).tpot_sigma
                )
        if cost_s is None:
            output = self.lengths.expected(needs.tokens_max)
            cost_s = prefill.ttft_s + predicted.exposed_s + output * predicted.tpot_s
        return Forecast(
            wait_s=prefill.wait_s,
            load_s=prefill.load_s + prefill.store_load_s,
            compute_s=prefill.compute_s,
            hop_s=prefill.hop_s,
            exposed_transfer_s=predicted.exposed_s,
            tpot_s=predicted.tpot_s,
            seen_tpot_s=predicted.seen_tpot_s,
            ttft_sigma=predicted.ttft_sigma,
            tpot_sigma=self.outlook(decode).tpot_sigma,
            ttft_errors=ttft_errors,
            tpot_errors=tpot_errors,
            meets=self.attainments.mapped(needs.slo_class, meets),
            said_meets=meets,
            cost_s=cost_s,
        )

    # --- what happens -----------------------------------------------------------------------------

    def observe_first_token(
        self, worker: WorkerSnapshot, predicted: Prediction, elapsed_s: float, timings: PhaseTimings | None
    ) -> None:
        """`elapsed_s`: from being placed to the first token. Without `timings` it is shared out as the
        prediction says."""
        self._outlooks.pop(worker.worker_id, None)
        learnt, fleet = self.corrections_of(worker.worker_id), self._fleet(worker.facts)
        expected, elapsed_s = predicted.prefill, max(0.0, elapsed_s)
        if timings is not None and not timings.is_usable:
            timings = None
        if expected.load_s:
            # An adapter is loaded before the worker's own clock starts, so this says nothing about its speed.
            took_s = max(0.0, elapsed_s - (expected.ttft_s - expected.load_s))
            self.adapter_s += ADAPTER_WEIGHT * (took_s - self.adapter_s)
            return
        z = _z(expected.ttft_s, elapsed_s, predicted.ttft_sigma)
        self.ttft_errors.observe(predicted.slo_class, expected.ttft_s, z, predicted.ttft_errors)
        if timings is None:
            hop_s = min(elapsed_s, expected.hop_s)
            is_waiting = expected.raw_wait_s > max(WAIT_FLOOR_S, 0.1 * expected.raw_compute_s)
            compute_s = min(elapsed_s - hop_s, expected.compute_s) if is_waiting else elapsed_s - hop_s
            wait_s = max(0.0, elapsed_s - hop_s - compute_s)
        else:
            wait_s, compute_s = timings.wait_s, timings.compute_s
            if expected.raw_store_load_s:
                for one in (learnt, fleet):
                    one.store_load.observe(expected.raw_store_load_s, timings.load_s)
            else:
                compute_s += timings.load_s
            hop_s = max(
                0.0, elapsed_s - wait_s - compute_s - (timings.load_s if expected.raw_store_load_s else 0.0)
            )
            is_waiting = max(wait_s, expected.raw_wait_s) > WAIT_FLOOR_S
            learnt.hop_s += HOP_WEIGHT * (min(hop_s, 4 * learnt.hop_s + 0.01) - learnt.hop_s)
            fleet.hop_s += HOP_WEIGHT * (min(hop_s, 4 * fleet.hop_s + 0.01) - fleet.hop_s)
        for one in (learnt, fleet):
            one.compute.observe(expected.raw_compute_s, compute_s)
            if is_waiting:
                one.wait.observe(expected.raw_wait_s + WAIT_FLOOR_S, wait_s + WAIT_FLOOR_S)
            one.total.observe(expected.ttft_s, elapsed_s)
        learnt.ttft_errors.observe(expected.ttft_s, elapsed_s, tolerance_s=TTFT_TOLERANCE_S)
        learnt.ttft_skill.observe(expected.ttft_s, elapsed_s, tolerance_s=TTFT_TOLERANCE_S)
        self._judge(learnt)

    def observe_end(
        self,
        worker: WorkerSnapshot,
        predicted: Prediction,
        generated_count: int,
        decode_s: float,
        *,
        is_whole: bool,
    ) -> None:
        """An attempt gave `generated_count` tokens, the first `decode_s` before the last. `is_whole`: they
        are the whole answer."""
        if is_whole:
            self.lengths.observe(generated_count)
        if generated_count > 1 and predicted.seen_tpot_s > 0.0:
            seen_s = max(0.0, decode_s) / (generated_count - 1)
            z = _z(predicted.seen_tpot_s, seen_s, TPOT_SIGMA)
            self.tpot_errors.observe(predicted.slo_class, predicted.seen_tpot_s, z, predicted.tpot_errors)
            self._fleet(worker.facts).seen_tpot.observe(predicted.plain_tpot_s, seen_s)
        if generated_count < TPOT_TOKENS_MIN:
            return
        self._outlooks.pop(worker.worker_id, None)
        steps = generated_count - 1
        actual_s = max(0.0, decode_s - predicted.exposed_s) / steps
        learnt = self.corrections_of(worker.worker_id)
        for one in (learnt, self._fleet(worker.facts)):
            one.tpot.observe(predicted.raw_tpot_s, actual_s)
        expected_s = predicted.tpot_s + predicted.exposed_s / steps
        learnt.tpot_errors.observe(expected_s, decode_s / steps, tolerance_s=TPOT_TOLERANCE_S)

    def observe_joined(self, source_host: str, target_host: str, joined: SequenceJoined) -> None:
        self.links.observe(
            (source_host, target_host),
            transferred_bytes=joined.transferred_bytes,
            transfer_s=joined.transfer_s,
            handover_s=joined.handover_s,
        )

    def calibration(self) -> tuple[ClassCalibration, ...]:
        """Return whether probabilities that were said turned out so, for each service class."""
        ttft, tpot = self.ttft_errors.held_shares(), self.tpot_errors.held_shares()
        names = sorted(ttft.keys() | tpot.keys())
        return tuple(
            ClassCalibration(name, *ttft.get(name, NOTHING_HELD), *tpot.get(name, NOTHING_HELD))
            for name in names
        )

    def _judge(self, learnt: WorkerCorrections) -> None:
        """Update whether predictions are good enough to decide by, after a TTFT of a worker was observed.

        Only that worker counts. Another that gets no prompts while predictions are not trusted has no new
        errors, and its old ones must not keep predictions from being trusted again. TPOT is not judged, since
        placement by cached prefix knows nothing of it."""
        self._excess.observe(0.0 if learnt.ttft_skill.is_enough else learnt.ttft_errors.excess)
        if self._excess.count < SEEN_MIN:
            return
        if self.is_trusted and self.excess > self._error_max:
            self.is_trusted = False
            self.fallback_count += 1
        elif not self.is_trusted and self.excess < 0.75 * self._error_max:
            self.is_trusted = True

    @property
    def excess(self) -> float:
        """Smoothed relative error of TTFT beyond the tolerance. A worker whose predictions say more than a
        constant would counts as 0."""
        return self._excess.value
