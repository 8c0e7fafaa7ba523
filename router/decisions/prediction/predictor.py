"""Seconds: how long one sequence will take at one worker or at two, and what was learnt from those before.

The model is `StepCosts`, as each worker measured it, applied to what this router knows of the worker: the
prompts ahead in the order in which it takes them, and the sequences that decode there. Waiting, computing
and decoding are corrected apart, each by what happened on that worker (see `correction`).
"""

from collections.abc import Mapping
from math import erf, exp, log, sqrt

from baton.core.costs import PLANNED_SHARE, PhaseTimings, prompt_pairs
from baton.core.ids import WorkerId
from baton.core.messages import SequenceJoined
from router.decisions.cluster_view import Worker
from router.decisions.prediction.correction import Correction
from router.decisions.prediction.forecast import Predicted, Prefill, Want
from router.decisions.prediction.links import Links, OutputLengths
from router.decisions.prediction.outlook import Outlook
from router.decisions.prediction.speed import Speed

TTFT_TOLERANCE_S, TPOT_TOLERANCE_S = 0.05, 0.005
"""Errors that no placement depends on."""
HOP_WEIGHT = 0.1
WAIT_FLOOR_S = 0.005
"""A wait is compared with its prediction when either is longer."""
TPOT_TOKENS_MIN = 8
"""A shorter answer says little of the time per token."""
OTHERS_SHARE = 1 / 3
"""How much of what is longer runs before a prompt: one turn in four is the oldest's."""
FLEETS_MAX = 64
BRING_S, HOST_BYTES_S, SSD_BYTES_S, PEER_BYTES_S = 0.002, 10e9, 2e9, 2e9
"""Bringing blocks of the store, before anything was seen of it."""
BRING_GAIN = 0.97
"""As workers do: what is brought must save more than it costs, by a margin."""
ADAPTER_FIRST_S, ADAPTER_WEIGHT = 0.5, 0.2


class _Fleet:
    """What the workers of one fingerprint have in common: where one that has seen nothing starts."""

    def __init__(self) -> None:
        self.wait, self.compute, self.bring, self.tpot, self.total = (Correction() for _ in range(5))
        self.hop_s = 0.0


class Predictor:
    def __init__(self, *, error_max: float) -> None:
        """`error_max`: mean relative error of TTFT, over the fleet, above which predictions are not
        trusted; they are again below three quarters of it. Infinite: always."""
        self.links = Links()
        self.lengths = OutputLengths()
        self.adapter_s = ADAPTER_FIRST_S
        """Of loading an adapter, smoothed."""
        self.fallback_count = 0
        self._error_max = error_max
        self._fleets: dict[str, _Fleet] = {}
        self._excess = 0.0
        self._seen_count = 0
        self.is_trusted = True

    def _fleet(self, worker: Worker) -> _Fleet:
        fingerprint = worker.hello.fingerprint
        found = self._fleets.get(fingerprint)
        if found is None:
            if len(self._fleets) >= FLEETS_MAX:
                del self._fleets[next(iter(self._fleets))]
            found = self._fleets[fingerprint] = _Fleet()
        return found

    # --- predictions ------------------------------------------------------------------------------

    def prefill(self, worker: Worker, want: Want, cached_tokens: int, *, now_s: float) -> Prefill:
        """Until the first token is here, if the prompt were sent there now."""
        speed = worker.speed
        ahead = worker.outlook or self._look(worker)
        chunk, beside_s = ahead.chunk_tokens, ahead.beside_s
        raw_compute_s = _compute_s(speed, cached_tokens, want.tokens, chunk, beside_s)
        loaded_tokens, raw_bring_s = _stored(worker, want, cached_tokens)
        if loaded_tokens:
            rest_s = _compute_s(speed, cached_tokens + loaded_tokens, want.tokens, chunk, beside_s)
            if rest_s + raw_bring_s < BRING_GAIN * raw_compute_s:
                raw_compute_s = rest_s
            else:
                raw_bring_s = 0.0
        raw_wait_s = _wait_s(worker, want, raw_compute_s, ahead, now_s)
        wait_s = raw_wait_s * ahead.wait_factor
        return Prefill(
            wait_s,
            raw_compute_s * ahead.compute_factor,
            ahead.hop_s,
            raw_wait_s,
            raw_compute_s,
            bring_s=max(0.0, raw_bring_s * ahead.bring_factor - wait_s),
            raw_bring_s=raw_bring_s,
        )

    def look(self, worker: Worker) -> Outlook:
        return worker.outlook or self._look(worker)

    def _look(self, worker: Worker) -> Outlook:
        speed, fleet = worker.speed, self._fleet(worker)
        costs = speed.costs
        decoding = worker.decode_count - worker.joining_count + worker.others_decodes
        context = _mean_context(worker)
        beside_s = (costs.decode_s + costs.context_token_s * context) * decoding
        chunk = _chunk_tokens(worker, decoding, beside_s)
        token_s = costs.prompt_token_s + (costs.base_s + beside_s) / chunk
        head = worker.backlog.head()
        total, tpot = speed.total, speed.tpot
        worker.outlook = Outlook(
            decoding=decoding,
            mean_context=context,
            beside_s=beside_s,
            step_s=costs.base_s + beside_s,
            chunk_tokens=chunk,
            token_s=token_s,
            head_s=token_s * head.tokens + costs.pair_s * head.pairs,
            hop_s=speed.hop_s if speed.compute.count else fleet.hop_s,
            wait_factor=speed.wait.factor(fleet.wait),
            compute_factor=speed.compute.factor(fleet.compute),
            bring_factor=speed.bring.factor(fleet.bring),
            tpot_factor=tpot.factor(fleet.tpot),
            ttft_sigma=total.sigma if total.count >= 4 else max(total.sigma, fleet.total.sigma),
            tpot_sigma=tpot.sigma if tpot.count >= 4 else max(tpot.sigma, fleet.tpot.sigma),
        )
        return worker.outlook

    def raw_tpot_s(
        self,
        worker: Worker,
        tokens: int,
        *,
        starts_in_s: float,
        output_tokens: float,
        now_s: float,
        slo_s: float = 0.0,
    ) -> float:
        """Of a sequence of `tokens` that begins to decode there in `starts_in_s`, as the model says.

        Beside it decode those that do now, as far as they have not ended by then, and those on their way. The
        number goes back to what is usual, until its end, as fast as answers end; they are taken to be
        memoryless. Prompts that the worker computes itself lengthen some of its steps.
        """
        speed, ahead = worker.speed, worker.outlook or self._look(worker)
        costs, mean = speed.costs, self.lengths.mean
        life_s = max(1e-6, mean * ahead.step_s / speed.tokens_per_step)
        left, usual = exp(-max(0.0, starts_in_s) / life_s), worker.usual_decodes
        if usual is None:
            count = ahead.decoding * left + worker.joining_count
        else:
            now = ahead.decoding + worker.joining_count
            count = usual + (now - usual) * left * _mean_left(output_tokens / mean)
        count = min(count + 1.0, float(worker.hello.batch_sequences_max))
        context = ahead.mean_context * (count - 1.0) + tokens + output_tokens / 2
        step_s = costs.base_s + costs.decode_s * count + costs.context_token_s * context
        behind = worker.backlog.tokens + worker.others_tokens
        # However many prompts come, no step has more of them beside it than a chunk, which the worker chooses
        # by the objectives of those that decode there.
        chunk = ahead.chunk_tokens
        if own_slo_s := slo_s or worker.hello.tpot_slo_s:
            chunk = min(chunk, _within(worker, own_slo_s, step_s))
        rho_s = min(step_s / (1.0 - worker.rho(now_s)), step_s + costs.prompt_token_s * chunk)
        share = min(behind / max(1.0, output_tokens), chunk)
        return max(rho_s, step_s + costs.prompt_token_s * share) / speed.tokens_per_step

    def tpot_s(
        self, worker: Worker, tokens: int, *, starts_in_s: float, output_tokens: float, now_s: float
    ) -> float:
        """`raw_tpot_s`, corrected: the TPOT of a decode worker at the time when decoding will start."""
        raw_s = self.raw_tpot_s(
            worker, tokens, starts_in_s=starts_in_s, output_tokens=output_tokens, now_s=now_s
        )
        return raw_s * self.look(worker).tpot_factor

    def exposed_s(
        self, source: Worker, target: Worker, want: Want, held_tokens: int, prefill: Prefill
    ) -> float:
        """From the first token to the decode worker's batch; `held_tokens`: there already."""
        hello = source.hello
        token_bytes = hello.block_bytes / max(1, hello.block_tokens)
        total = max(0, want.tokens - held_tokens) * token_bytes
        last = min(total, hello.step_tokens_max * token_bytes)
        return self.links.exposed_s(
            (hello.host, target.hello.host), total_bytes=total, last_bytes=last, hidden_s=prefill.compute_s
        )

    def of_pair(
        self, source: Worker, target: Worker | None, want: Want, held: Mapping[WorkerId, int], *, now_s: float
    ) -> Predicted:
        """Of a placement that something else chose; `held`: leading tokens in each worker's cache. `target`
        None: both phases at `source`."""
        prefill = self.prefill(source, want, held.get(source.worker_id, 0), now_s=now_s)
        decode = target or source
        raw_s = self.raw_tpot_s(
            decode,
            want.tokens,
            starts_in_s=prefill.ttft_s,
            output_tokens=self.lengths.expected(want.tokens_max),
            now_s=now_s,
            slo_s=want.tpot_slo_s,
        )
        exposed_s = 0.0
        if target is not None:
            exposed_s = self.exposed_s(source, target, want, held.get(target.worker_id, 0), prefill)
        return Predicted(prefill, raw_s, raw_s * self.look(decode).tpot_factor, exposed_s)

    # --- what happens -----------------------------------------------------------------------------

    def saw_first_token(
        self, worker: Worker, predicted: Predicted, elapsed_s: float, timings: PhaseTimings | None
    ) -> None:
        """`elapsed_s`: from being placed to the first token. Without `timings` it is shared out as the
        prediction says."""
        worker.outlook = None
        speed, fleet, said = worker.speed, self._fleet(worker), predicted.prefill
        if said.load_s:
            # Before the worker's own clock starts; says nothing of its speed.
            took_s = max(0.0, elapsed_s - (said.ttft_s - said.load_s))
            self.adapter_s += ADAPTER_WEIGHT * (took_s - self.adapter_s)
            return
        if timings is None:
            hop_s = min(elapsed_s, said.hop_s)
            is_waiting = said.raw_wait_s > max(WAIT_FLOOR_S, 0.1 * said.raw_compute_s)
            compute_s = min(elapsed_s - hop_s, said.compute_s) if is_waiting else elapsed_s - hop_s
            wait_s = max(0.0, elapsed_s - hop_s - compute_s)
        else:
            wait_s, compute_s = timings.wait_s, timings.compute_s
            if said.raw_bring_s:
                for one in (speed, fleet):
                    one.bring.saw(said.raw_bring_s, timings.load_s)
            else:
                compute_s += timings.load_s
            hop_s = max(0.0, elapsed_s - wait_s - compute_s - (timings.load_s if said.raw_bring_s else 0.0))
            is_waiting = max(wait_s, said.raw_wait_s) > WAIT_FLOOR_S
            speed.hop_s += HOP_WEIGHT * (min(hop_s, 4 * speed.hop_s + 0.01) - speed.hop_s)
            fleet.hop_s += HOP_WEIGHT * (min(hop_s, 4 * fleet.hop_s + 0.01) - fleet.hop_s)
        for one in (speed, fleet):
            one.compute.saw(said.raw_compute_s, compute_s)
            if is_waiting:
                one.wait.saw(said.raw_wait_s + WAIT_FLOOR_S, wait_s + WAIT_FLOOR_S)
            one.total.saw(said.ttft_s, elapsed_s)
        speed.ttft_errors.saw(said.ttft_s, elapsed_s, tolerance_s=TTFT_TOLERANCE_S)
        self._judge(worker)

    def saw_end(
        self, worker: Worker, predicted: Predicted, generated_count: int, decode_s: float, *, is_whole: bool
    ) -> None:
        """Of an attempt that gave `generated_count` tokens, the first `decode_s` before the last."""
        if is_whole:
            self.lengths.saw(generated_count)
        if generated_count < TPOT_TOKENS_MIN:
            return
        worker.outlook = None
        steps = generated_count - 1
        actual_s = max(0.0, decode_s - predicted.exposed_s) / steps
        for one in (worker.speed, self._fleet(worker)):
            one.tpot.saw(predicted.raw_tpot_s, actual_s)
        said_s = predicted.tpot_s + predicted.exposed_s / steps
        worker.speed.tpot_errors.saw(said_s, decode_s / steps, tolerance_s=TPOT_TOLERANCE_S)
        self._judge(worker)

    def saw_joined(self, source: Worker | None, target: Worker, joined: SequenceJoined) -> None:
        if source is not None:
            self.links.saw(
                (source.hello.host, target.hello.host),
                transferred_bytes=joined.transferred_bytes,
                transfer_s=joined.transfer_s,
                handover_s=joined.handover_s,
            )

    def _judge(self, worker: Worker) -> None:
        """Whether predictions are good enough to decide by."""
        excess = max(worker.speed.ttft_errors.excess, worker.speed.tpot_errors.excess)
        self._seen_count += 1
        self._excess += max(0.02, 1.0 / self._seen_count) * (excess - self._excess)
        if self._seen_count < 30:
            return
        if self.is_trusted and self._excess > self._error_max:
            self.is_trusted = False
            self.fallback_count += 1
        elif not self.is_trusted and self._excess < 0.75 * self._error_max:
            self.is_trusted = True

    @property
    def excess(self) -> float:
        """Smoothed relative error beyond the tolerances, the worse of TTFT's and TPOT's."""
        return self._excess


def _stored(worker: Worker, want: Want, cached_tokens: int) -> tuple[int, float]:
    """Tokens beyond the worker's own that its store could bring, and the seconds that takes."""
    hello = worker.hello
    if want.stored is None or not hello.block_bytes:
        return 0, 0.0
    run = want.stored.run(hello.host, cached_tokens // hello.block_tokens)
    tokens = min(run.block_count * hello.block_tokens, want.tokens - 1 - cached_tokens)
    if tokens <= 0:
        return 0, 0.0
    of_bytes = run.host / HOST_BYTES_S + run.ssd / SSD_BYTES_S + run.peer / PEER_BYTES_S
    return tokens, BRING_S + hello.block_bytes * of_bytes


def _mean_left(lives: float) -> float:
    """Of what dies away by 1/e in one life: the mean over so many."""
    return (1.0 - exp(-lives)) / lives if lives > 1e-3 else 1.0


def _mean_context(worker: Worker) -> float:
    count = worker.decode_count + worker.others_decodes
    return (worker.decode_context + worker.others_context) / count if count else 0.0


def _chunk_tokens(worker: Worker, decoding: float, beside_s: float) -> int:
    """Prompt tokens of one step beside what decodes there, whose objectives hold it down."""
    hello, costs = worker.hello, worker.speed.costs
    most = max(1, hello.step_tokens_max - int(decoding))
    slo_s = worker.strictest_tpot_slo_s
    return min(most, _within(worker, slo_s, costs.base_s + beside_s)) if slo_s else most


def _within(worker: Worker, slo_s: float, step_s: float) -> int:
    """Prompt tokens that such a step without any may take besides, as the worker plans it."""
    left_s = slo_s * PLANNED_SHARE - step_s
    within = int(left_s / max(1e-9, worker.speed.costs.prompt_token_s)) if left_s > 0 else 0
    return max(1, worker.hello.chunk_tokens_min, within)


def _compute_s(speed: Speed, start: int, end: int, chunk: int, beside_s: float) -> float:
    costs, count = speed.costs, end - start
    steps = -(-count // chunk)
    return (
        steps * (costs.base_s + beside_s)
        + costs.prompt_token_s * count
        + costs.pair_s * prompt_pairs(start, end)
    )


def _wait_s(worker: Worker, want: Want, compute_s: float, ahead: Outlook, now_s: float) -> float:
    costs, backlog = worker.speed.costs, worker.backlog
    if not backlog.count and not worker.others_tokens:
        # The step that decodes now, and the one planned behind it.
        return ahead.step_s if ahead.beside_s else 0.0
    before = backlog.ahead(want.priority, want.tokens)
    token_s = ahead.token_s
    before_s = token_s * (before.tokens + worker.others_tokens) + costs.pair_s * before.pairs
    if before.prompts:
        before_s = max(0.0, before_s - min(ahead.head_s, now_s - worker.head_since_s))
    longer_s = token_s * (backlog.tokens - before.tokens) + costs.pair_s * (backlog.pairs - before.pairs)
    if longer_s > 0.0:
        step_s = min(longer_s, ahead.step_s + costs.prompt_token_s * ahead.chunk_tokens)
        longer_s = max(step_s / 2, min(longer_s, OTHERS_SHARE * (before_s + compute_s)))
    return before_s + longer_s


def chance(limit_s: float, predicted_s: float, sigma: float) -> float:
    """That what is predicted, with log-normal errors, stays within the limit."""
    if limit_s <= 0.0:
        return 0.0
    if predicted_s <= 0.0:
        return 1.0
    return 0.5 * (1.0 + erf(log(limit_s / predicted_s) / (sigma * SQRT2)))


SQRT2 = sqrt(2.0)
