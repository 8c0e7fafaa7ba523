"""The analytic model of one worker: seconds of waiting, computing and decoding, before any correction.

The model is `StepCosts`, as each worker measured it, applied to what this router knows of the worker: the
prompts ahead in the order in which it takes them, and the sequences that decode there.
"""

from math import ceil, erf, exp, log, sqrt

from baton.core.costs import prompt_pairs
from router.decisions.cluster.prediction_inputs import PredictionInputs
from router.decisions.cluster.snapshot import WorkerSnapshot
from router.decisions.prediction.forecast import SequenceNeeds
from router.decisions.prediction.outlook import Outlook

OTHERS_SHARE = 1 / 3
"""The part of longer prompts that runs before a shorter one, since every fourth turn is the oldest
prompt's."""
STORE_LOAD_FIRST_S, HOST_BYTES_S, SSD_BYTES_S, PEER_BYTES_S = 0.002, 10e9, 2e9, 2e9
"""Assumed latency and rates of loading blocks from the store, before any load was observed."""
SQRT2 = sqrt(2.0)


def stored_s(worker: WorkerSnapshot, needs: SequenceNeeds, cached_tokens: int) -> tuple[int, float]:
    """Return the tokens beyond the worker's own cache that it could load from the store, and the seconds for
    it."""
    facts = worker.facts
    if needs.stored is None or not facts.block_bytes:
        return 0, 0.0
    run = needs.stored.run(facts.host, cached_tokens // facts.block_tokens)
    tokens = min(run.block_count * facts.block_tokens, needs.tokens - 1 - cached_tokens)
    if tokens <= 0:
        return 0, 0.0
    of_bytes = run.host / HOST_BYTES_S + run.ssd / SSD_BYTES_S + run.peer / PEER_BYTES_S
    return tokens, STORE_LOAD_FIRST_S + facts.block_bytes * of_bytes


def mean_left(lives: float) -> float:
    """The mean, over so many lives, of what dies away by 1/e in one."""
    return (1.0 - exp(-lives)) / lives if lives > 1e-3 else 1.0


def mean_context(inputs: PredictionInputs) -> float:
    count = inputs.decode_count + inputs.others_decodes
    return (inputs.decode_context + inputs.others_context) / count if count else 0.0


def compute_s(ahead: Outlook, start: int, end: int) -> float:
    """Return the seconds to compute positions [start, end) of a prompt beside those that decode there now."""
    prompts, count, pairs = ahead.prompts, end - start, prompt_pairs(start, end)
    work_s = prompts.costs.prompts_s(count, pairs)
    steps = ceil(prompts.full_steps(count, work_s))
    return max(steps * prompts.costs.floor_s, steps * prompts.step_s + work_s)


def wait_s(
    inputs: PredictionInputs, needs: SequenceNeeds, computing_s: float, ahead: Outlook, now_s: float
) -> float:
    backlog = inputs.backlog
    if not backlog.prompts and not inputs.others_tokens:
        # The prompt waits for the decode step that runs now and for the one planned behind it.
        return ahead.step_s if ahead.beside_s else 0.0
    before = backlog.ahead(needs.priority, needs.tokens)
    before_s = ahead.prompts.seconds(before.tokens + inputs.others_tokens, before.pairs)
    if before.prompts:
        before_s = max(0.0, before_s - min(ahead.head_s, now_s - inputs.head_since_s))
    longer_s = ahead.prompts.seconds(backlog.tokens - before.tokens, backlog.pairs - before.pairs)
    if longer_s > 0.0:
        # Attention is left out of the step: the mean position falls with a short prompt more, and more work
        # ahead must not make the wait shorter.
        step_s = min(longer_s, ahead.step_s + ahead.prompts.longest_s())
        longer_s = max(step_s / 2, min(longer_s, OTHERS_SHARE * (before_s + computing_s)))
    return before_s + longer_s


def attainment_probability(limit_s: float, predicted_s: float, sigma: float) -> float:
    """Return the probability that a value stays within the limit, if prediction errors are log-normal."""
    if limit_s <= 0.0:
        return 0.0
    if predicted_s <= 0.0:
        return 1.0
    ratio = limit_s / predicted_s
    return 0.5 * (1.0 + erf(log(ratio) / (sigma * SQRT2))) if ratio > 0.0 else 0.0
