"""Draft tokens, and when they pay.

A draft token costs the verification of one more token and can only save steps: the executor draws every token
as it would have been drawn without speculation (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", ICML 2023, in the special case of a deterministic proposal and draws that depend on
(seed, index) alone). The hit rate is measured on every token, also while none
is verified: the token that would have been drafted is compared with the one that came.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from baton.config import EngineConfig
from engine.scheduling.sequence import Drafter, Sequence
from engine.scheduling.step_time import StepTimeModel, StepWork

NGRAM_SIZES = (4, 3, 2)
"""Longest first."""
INDEXED_TOKENS_MAX = 16_384
"""Most tokens of a text that are indexed. The beginning of a longer text is left out."""
OBSERVED_AT_ONCE_MAX = 512
"""Tokens indexed per call, so that a long prompt does not hold up a step."""
HIT_RATES_AT_FIRST = (0.3, 0.5, 0.6, 0.8)
"""Assumed hit rates by length of the match: 2, 3, 4 to 7, 8 and more tokens."""
HIT_RATE_WEIGHT = 0.2
"""Weight of the newest draft token in a measured hit rate."""
DRAFT_HIT_RATE_AT_FIRST = 0.6
DRAFT_CHANCE_MIN = 0.1
"""Least hit rate of the draft model's tokens for which the model is asked."""
MARGIN = 1.3
"""Expected tokens of a draft must be worth so many times its predicted cost."""
WAIT_SHARE = 0.3
"""Expected extra tokens, per sequence of the batch, for which a step waits for the result before it."""
TRY_AGAIN_TOKENS = 64
"""A draft model that was not worth it is tried again after so many tokens."""
TRIAL_STEPS, TRIAL_STEPS_MAX = 64, 1024
"""Steps without a draft token after which one sequence gets some to learn what they cost now. The number
doubles with each trial after which they are still too dear."""
TRIAL_DRAFTS = 4
"""Draft tokens of a trial."""
TRIAL_HIT_RATE = 0.6
"""Least hit rate for a trial: text that does not repeat itself pays for none."""


class NgramDrafter:
    """Prompt lookup: what followed the same few tokens the last time follows again.

    Work and memory per token are constant: one entry per n-gram size, which names where the latest such
    n-gram ended. A match that goes on is followed from token to token, and counts as the longer one.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._seen_count = 0
        self._after: dict[tuple[int, ...], int] = {}
        """n-gram -> position that follows its latest occurrence but the text's end."""
        self._next = -1
        """Position that the next token is expected to repeat; -1: no match."""
        self._match_length = 0
        self._hit_rates = list(HIT_RATES_AT_FIRST)

    @property
    def hit_rate(self) -> float:
        if self._next < 0 or self._seen_count < len(self._tokens):
            return 0.0
        return self._hit_rates[_bucket(self._match_length)]

    def observe(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._seen_count = max(self._seen_count, len(tokens) - INDEXED_TOKENS_MAX)
        end = min(len(tokens), self._seen_count + OBSERVED_AT_ONCE_MAX)
        while self._seen_count < end:
            self._take(tokens, self._seen_count)

    def offer(self, drafts: tuple[int, ...]) -> None:
        pass  # no draft model runs

    def draft(self, count: int) -> tuple[int, ...]:
        """A match nearer to the end than `count` goes on with itself: a loop is drafted as a loop."""
        if self._next < 0 or self._seen_count < len(self._tokens):
            return ()
        found = self._tokens[self._next : self._next + count]
        period = len(self._tokens) - self._next
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)

    def _take(self, tokens: list[int], position: int) -> None:
        if self._next >= 0:
            self._score(tokens[position])
        for size in NGRAM_SIZES:  # those that end before this token: now it is known what follows
            if position >= size:
                self._after[tuple(tokens[position - size : position])] = position
        self._seen_count = position + 1
        if self._next < 0:
            self._look_up(tokens, position + 1)

    def _score(self, token: int) -> None:
        bucket = _bucket(self._match_length)
        is_hit = self._tokens[self._next] == token
        self._hit_rates[bucket] += HIT_RATE_WEIGHT * (is_hit - self._hit_rates[bucket])
        self._next = self._next + 1 if is_hit else -1
        self._match_length += 1

    def _look_up(self, tokens: list[int], end: int) -> None:
        for size in NGRAM_SIZES:
            found = self._after.get(tuple(tokens[end - size : end])) if end >= size else None
            if found is not None:
                self._next, self._match_length = found, size
                return


class ModelDrafter:
    """Keeps the draft tokens of a draft model, and how often they are right."""

    def __init__(self) -> None:
        self._drafts: tuple[int, ...] = ()
        self._seen_count = 0
        self._hit_rate = DRAFT_HIT_RATE_AT_FIRST

    @property
    def hit_rate(self) -> float:
        """While low it is now and then taken for what it was at first, so that it is measured again."""
        is_trial = self._seen_count % TRY_AGAIN_TOKENS == 0
        return max(self._hit_rate, DRAFT_HIT_RATE_AT_FIRST) if is_trial else self._hit_rate

    def observe(self, tokens: list[int]) -> None:
        for token in tokens[max(self._seen_count, len(tokens) - OBSERVED_AT_ONCE_MAX) :]:
            if self._drafts:
                is_hit = self._drafts[0] == token
                self._hit_rate += HIT_RATE_WEIGHT * (is_hit - self._hit_rate)
                self._drafts = self._drafts[1:] if is_hit else ()
        self._seen_count = len(tokens)

    def offer(self, drafts: tuple[int, ...]) -> None:
        self._drafts = drafts

    def draft(self, count: int) -> tuple[int, ...]:
        return self._drafts[:count]


class DraftTrials:
    """When draft tokens are verified although they seem too dear. Pure.

    Their cost is learnt from steps that had some. A few slow ones, and there would be no further step to
    learn from: drafts would stay off for as long as the worker lives.
    """

    def __init__(self) -> None:
        self._wait_steps = TRIAL_STEPS
        self._steps_without = 0

    @property
    def is_due(self) -> bool:
        return self._steps_without >= self._wait_steps

    def tried(self) -> None:
        """Note a trial, or that there was no room for one."""
        self._steps_without = 0
        self._wait_steps = min(2 * self._wait_steps, TRIAL_STEPS_MAX)

    def stepped(self, *, has_drafts: bool) -> None:
        """Note a step, with draft tokens that are worth their cost or without any."""
        if has_drafts:
            self._steps_without, self._wait_steps = 0, TRIAL_STEPS
        else:
            self._steps_without += 1


class Speculator:
    """Decides how many draft tokens each sequence of a step gets, and whether to wait for them."""

    def __init__(self, engine: EngineConfig) -> None:
        self._mode = engine.speculation
        self._count_max = engine.speculation_tokens_max
        self._trials = DraftTrials()

    @property
    def wants_history(self) -> bool:
        """A draft model must know the whole text."""
        return self._mode == "draft"

    def drafter(self) -> Drafter | None:
        if self._mode == "ngram":
            return NgramDrafter()
        return ModelDrafter() if self._mode == "draft" else None

    def drafts_wanted(self, seq: Sequence) -> int:
        """Number of tokens wanted of the draft model, beyond those that the step samples."""
        if self._mode != "draft" or seq.drafter is None:
            return 0
        return max(0, min(self._count_of(seq.drafter.hit_rate, DRAFT_CHANCE_MIN), _room(seq) - 1))

    def drafts(
        self, decodes: Ordered[Sequence], times: StepTimeModel, *, budget: int
    ) -> list[tuple[int, ...]]:
        """One entry per sequence: what to verify after its newest token, `budget` tokens together."""
        if self._mode == "off":
            return [()] * len(decodes)
        least_rate = _least_worth(decodes, times)
        found: list[tuple[int, ...]] = []
        for seq in decodes:
            draft: tuple[int, ...] = ()
            if seq.drafter is not None:
                seq.drafter.observe(seq.tokens)
                count = min(self._count_of(seq.drafter.hit_rate, least_rate), _room(seq), budget)
                draft = seq.drafter.draft(count) if count > 0 else ()
            budget -= len(draft)
            found.append(draft)
        has_drafts = any(found)
        self._trials.stepped(has_drafts=has_drafts)
        if self._trials.is_due and (best := self._for_trial(decodes)) is not None:
            seq, drafter = decodes[best], decodes[best].drafter
            count = min(TRIAL_DRAFTS, self._count_max, _room(seq), budget)
            if drafter is not None and count > 0:
                found[best] = drafter.draft(count)
            self._trials.tried()
        return found

    def _for_trial(self, sequences: Ordered[Sequence]) -> int | None:
        """The sequence whose draft tokens are the likeliest to be right; None: those of none are likely."""
        rates = [0.0 if seq.drafter is None else seq.drafter.hit_rate for seq in sequences]
        best = max(range(len(rates)), key=rates.__getitem__, default=None)
        return best if best is not None and rates[best] >= TRIAL_HIT_RATE else None

    def is_worth_waiting(self, running: Iterable[Sequence], times: StepTimeModel) -> bool:
        """True if enough tokens are expected from speculation after the step under way that waiting for its
        result pays more than planning ahead. The step's own tokens must come as expected, too."""
        if self._mode == "off":
            return False
        decodes = [seq for seq in running if seq.sampling_count and seq.drafter is not None]
        least_rate = _least_worth(decodes, times)
        extra = 0.0
        for seq in decodes:
            assert seq.drafter is not None
            seq.drafter.observe(seq.tokens)
            rate = seq.drafter.hit_rate
            count = min(self._count_of(rate, least_rate), _room(seq) - 1)
            if count > 0:
                extra += _expected(rate, count) * (rate if self._mode == "ngram" else 1.0)
        is_trial = self._trials.is_due and self._for_trial(decodes) is not None
        return is_trial or extra > WAIT_SHARE * len(decodes)

    def _count_of(self, hit_rate: float, least_rate: float) -> int:
        """Number of draft tokens that are each worth their cost. The n-th is right with probability hit_rate
        ** n."""
        count, chance = 0, hit_rate
        while count < self._count_max and chance >= least_rate:
            count += 1
            chance *= hit_rate
        return count


def _least_worth(decodes: Ordered[Sequence], times: StepTimeModel) -> float:
    """Hit rate from which on verifying a draft token beats computing the same token in a step of its own.
    With a large batch a token costs little as it is, and speculation stops paying."""
    if not decodes:
        return 1.0
    work = StepWork(decodes=len(decodes), context_tokens=sum(seq.planned_count for seq in decodes))
    token_s = times.predict_s(work) / len(decodes)
    return max(0.02, MARGIN * times.draft_s / max(token_s, 1e-9))


def _room(seq: Sequence) -> int:
    """Draft tokens that could still be of use: the token after them is sampled as well."""
    left_count = seq.sampling.max_tokens - seq.generated_count
    return min(left_count, seq.tokens_max - len(seq.tokens)) - 1


def _expected(rate: float, count: int) -> float:
    return sum(rate**n for n in range(1, count + 1))


def _bucket(match_length: int) -> int:
    return 0 if match_length <= 2 else 1 if match_length == 3 else 2 if match_length < 8 else 3
