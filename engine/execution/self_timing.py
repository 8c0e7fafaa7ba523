"""A worker times itself when it starts: real steps on its own model and pool, before anybody uses them.

Prompt chunks of several lengths, one far into a prompt, and batches that decode, small and large, at short
and long contexts: what `StepTimeModel` needs to tell its costs apart. A worker that starts again makes the
first few only, and takes the rest from that time if those agree with it (`cached_timings`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Protocol, TypeVar

from baton.config import EngineConfig
from baton.core.costs import prompt_pairs
from baton.core.geometry import blocks_for
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan, StepResult
from engine.scheduling.step_time import StepTimeModel, StepWork

PROMPTS = (32, 128, 512, 2048)
BATCHES = (1, 8, 32, 128)
CONTEXTS = (64, 1024)
SHORT_TOKENS = 4
DRAFTS = 4
"""Draft tokens of a sequence in the steps that tell what they cost."""
FAR_POSITIONS, FAR_TOKENS = 8192, 32
"""A short chunk that ends so far into its prompt tells what attention costs there, in little time."""
ROUNDS, TOGETHER = 2, 3
"""Steps of each shape, one after another or following one another through stages. The first pays for what is
made on first use, or for the stages that are empty, and does not count."""
LONG_STEP_S = 0.1
"""One step that is expected to take so long is enough: what is made on first use is little beside it, and
there are others to measure."""
CHECKED_SHAPES = 3
"""Shapes that are timed at each start: one sequence, a short prompt, and a batch. The others need not be
timed again if these took as long as before, or all of them changed alike."""
CHECK_FACTOR = 2.0
"""Factor by which the change of one step's time may differ from the others'. Processors that other machines
share, or that are clocked by their heat, change the speed of everything by two within minutes."""

LATER_SHARE = 0.25
"""Part of the budget for shapes that are renewed, or that no earlier start had time for, where the others are
known."""

B = TypeVar("B")
Measured = list[tuple[StepWork, float]]
"""Work and seconds of each step."""


def time_steps(
    execute: Callable[[Sequence[StepPlan]], list[StepResult]],
    *,
    block_tokens: int,
    block_count: int,
    step_tokens_max: int,
    batch_sequences_max: int,
    positions_max: int,
    vocab: int,
    budget_s: float,
    stages: int = 1,
    drafts: int = 0,
    earlier: Sequence[tuple[StepWork, float]] = (),
    now: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Time steps of several shapes. `positions_max`: of one sequence. Uses any blocks of the pool, which
    nobody may use yet, and leaves no sequence behind in the executor. `drafts`: draft tokens that a sequence
    may have; 0: there is no speculation. `budget_s`: seconds for all steps together; a step that would take
    more than is left is skipped. `earlier`: what an earlier start measured. If the first few steps all take
    as long as then, or all as many times as long, others that were made then are not made again, but for the
    first of them: the result begins with their times of then, times that. What was made now comes last, so
    that each start renews another shape. All but the first few have `LATER_SHARE` of the budget then.

    `execute` may begin a step before the one before it is done. In a worker of several stages, chunks of
    prompts are given to it together, and so are the groups in which sequences take turns to decode.
    """
    maker = _Maker(block_tokens, block_count, vocab)
    measured: Measured = []
    known: dict[StepWork, float] = {}
    oldest: StepWork | None = None
    times = StepTimeModel(chunk_tokens=step_tokens_max, stages=stages)
    ends_s = now() + budget_s
    shapes = _shapes(maker, step_tokens_max, batch_sequences_max, positions_max, min(drafts, DRAFTS))
    for number, (items, work) in enumerate(shapes):
        if number == CHECKED_SHAPES and (known := _still_true(dict(earlier), measured)):
            ends_s = min(ends_s, now() + budget_s * LATER_SHARE)
            oldest = next(iter(known))  # it is made anew: a disturbed measurement must not stay for ever
            known[oldest] = known.pop(oldest)  # the turn passes on, even if there is no time for it
        if work in known and work != oldest:
            continue
        is_first_of_kind = len(measured) < 2
        fills = stages > 1 and (work.prompt_tokens > 0 or work.decodes >= stages)
        groups = _groups(items, stages if fills and work.decodes else 1)
        together = TOGETHER if fills else 1
        is_long = not fills and not is_first_of_kind and times.predict_s(work) > LONG_STEP_S
        round_count = 1 if is_long or fills else ROUNDS
        for round_number in range(round_count):
            to_come = together * (round_count - round_number)
            if now() + to_come * times.predict_s(work) > ends_s and not is_first_of_kind:
                break
            results = execute([maker.plan(group) for _ in range(together) for group in groups])
            added_s = [one.elapsed_s - one.overlap_s for one in results]
            rounds = [sum(added_s[i : i + len(groups)]) for i in range(0, len(added_s), len(groups))]
            for elapsed_s in rounds if round_number or is_long else rounds[1:]:
                times.observe(work, elapsed_s)
                measured.append((work, elapsed_s))
    execute([maker.goodbye()])
    made = dict(measured)
    return [one for one in known.items() if one[0] not in made] + measured


def _still_true(earlier: dict[StepWork, float], measured: Measured) -> dict[StepWork, float]:
    """Return what `earlier` says of work that is not in `measured`, times the change of the steps that are;
    nothing if some of these were not made then, or did not change as the others did."""
    fresh = dict(measured)
    if not fresh.keys() <= earlier.keys():
        return {}
    changes = [elapsed_s / earlier[work] for work, elapsed_s in fresh.items()]
    change = median(changes)
    if any(not change / CHECK_FACTOR <= one <= change * CHECK_FACTOR for one in changes):
        return {}
    return {work: elapsed_s * change for work, elapsed_s in earlier.items() if work not in fresh}


class Stepper(Protocol[B]):
    """What `Executor` has: a step may go on elsewhere when `begin` returns, and `finish` waits for it."""

    def begin(self, plan: StepPlan) -> StepResult | B: ...

    def finish(self, step: B) -> StepResult: ...


def execute_together(stepper: Stepper[B], plans: Sequence[StepPlan]) -> list[StepResult]:
    """Execute all plans, each beginning as soon as the one before it may go on elsewhere."""
    with ThreadPoolExecutor(max_workers=1) as finishing:
        results: list[StepResult | Future[StepResult]] = []
        for plan in plans:
            step = stepper.begin(plan)
            results.append(step if isinstance(step, StepResult) else finishing.submit(stepper.finish, step))
        return [one.result() if isinstance(one, Future) else one for one in results]


def _groups(items: tuple[StepItem, ...], count: int) -> list[tuple[StepItem, ...]]:
    size = -(-len(items) // count)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _shapes(
    maker: "_Maker", step_tokens_max: int, batch_sequences_max: int, positions_max: int, drafts: int
) -> Iterator[tuple[tuple[StepItem, ...], StepWork]]:
    """Cheap and telling ones first. None needs more blocks than there are."""
    positions_max = min(positions_max, maker.positions_max)
    lengths = sorted({min(n, step_tokens_max, positions_max) for n in PROMPTS})
    batches = sorted({min(n, batch_sequences_max) for n in BATCHES})
    yield maker.decodes(1, min(CONTEXTS[0], positions_max - 1))
    yield maker.prompt(0, lengths[0])
    for batch in batches[1:3]:
        yield maker.decodes(batch, min(CONTEXTS[0], positions_max - 1))
    for batch in batches[:3]:
        yield maker.decodes(batch, min(CONTEXTS[1], positions_max - 1))
    for batch in batches[:2] if drafts else ():  # else drafts would be judged by a guess until they are used
        if batch * (1 + drafts) <= step_tokens_max and CONTEXTS[0] + drafts < positions_max:
            yield maker.decodes(batch, CONTEXTS[0], drafts=drafts)
    # What attention costs far into a prompt decides how long a long one takes. A full chunk there shows it as
    # well, and on a slow processor there would be no time left for it.
    far = min(positions_max, FAR_POSITIONS)
    tokens = min(FAR_TOKENS, step_tokens_max)
    if far > 4 * lengths[-1]:  # else a chunk of that prompt is as far in
        yield maker.prompt(far - tokens, tokens)
    for length in lengths[1:]:
        yield maker.prompt(0, length)
    for batch in batches[3:]:
        yield maker.decodes(batch, min(CONTEXTS[1], positions_max - 1))
    for length in lengths[-2:]:
        yield maker.prompt(max(0, min(3 * length, positions_max - length)), length)
    for batch in batches[3:]:
        yield maker.decodes(batch, min(CONTEXTS[0], positions_max - 1))


class _Maker:
    def __init__(self, block_tokens: int, block_count: int, vocab: int) -> None:
        self._block_tokens, self._block_count, self._vocab = block_tokens, block_count, vocab
        self._step_number = 0
        self._keys: dict[SeqKey, None] = {}
        self._sampling = SamplingParams(max_tokens=2**20, temperature=0.0, seed=0)

    @property
    def positions_max(self) -> int:
        return self._block_count * self._block_tokens

    def plan(self, items: tuple[StepItem, ...]) -> StepPlan:
        self._step_number += 1
        self._keys.update(dict.fromkeys(item.key for item in items))
        return StepPlan(items, self._step_number)

    def goodbye(self) -> StepPlan:
        return StepPlan((), self._step_number + 1, ended=tuple(self._keys))

    def prompt(self, start: int, count: int) -> tuple[tuple[StepItem, ...], StepWork]:
        work = StepWork(prompt_tokens=count, pairs=prompt_pairs(start, start + count))
        return (self._item(0, start, count),), work

    def decodes(self, batch: int, context: int, *, drafts: int = 0) -> tuple[tuple[StepItem, ...], StepWork]:
        """Sequences may share blocks: they write to different slots only if they do not, and nobody
        reads what they wrote. `drafts`: of each."""
        context = max(1, context)
        items = tuple(self._item(i, context, 1 + drafts, drafts=drafts) for i in range(batch))
        work = StepWork(decodes=batch, context_tokens=batch * context, drafts=batch * drafts)
        return items, work

    def _item(self, index: int, start: int, count: int, *, drafts: int = 0) -> StepItem:
        end = start + count
        blocks = blocks_for(end, self._block_tokens)
        first = index * blocks
        tokens = tuple((index * 31 + position * 7919) % self._vocab for position in range(start, end))
        return StepItem(
            key=SeqKey(SequenceId(f"self-timing/{index}"), 0),
            tokens=tokens,
            first_position=start,
            block_ids=tuple((first + i) % self._block_count for i in range(blocks)),
            sample_index=0,
            sampling=self._sampling,
            draft_count=drafts,
            prompt_token_count=end - drafts,
        )


def warm_up_plans(
    engine: EngineConfig,
    max_model_tokens: int,
    block_count: int,
    *,
    on_cpu: bool,
    sizes: Sequence[int] = (),
) -> tuple[StepPlan, ...]:
    """A prompt chunk, and a batch of decodes, or one for each of `sizes`. The chunk is a full one where its
    size decides what memory is set aside. On a CPU it does not, and a full one would take seconds of the
    worker's start. On a device a short chunk follows, for the kernels of a few tokens."""
    chunk = min(engine.step_tokens_max, max_model_tokens - 1)
    if on_cpu:
        chunk = min(chunk, PROMPTS[1])
    batches = [min(n, block_count) for n in sizes or (engine.batch_sequences_max,)]
    greedy = SamplingParams(max_tokens=1)

    def item(number: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> StepItem:
        return StepItem(SeqKey(SequenceId(f"warm-up/{number}"), 0), tokens, 0, blocks, 0, greedy)

    def prompt(tokens: int) -> tuple[StepItem, ...]:
        return (item(0, (0,) * max(1, tokens), tuple(range(block_count))),)

    chunks = [prompt(chunk)] if on_cpu else [prompt(chunk), prompt(min(chunk, SHORT_TOKENS))]
    decodes = [tuple(item(n, (0,), (n,)) for n in range(count)) for count in batches]
    return tuple(StepPlan(items, number) for number, items in enumerate([*chunks, *decodes]))
