"""Load, fetch or recompute: the blocks of a cached prefix that are worth loading, by predicted time. Pure.

The first `held_count` blocks of a chain are in the worker's pool, and the next are on paths with a queue and
a speed each. Loading blocks [m, n) while [held, m) are computed, then computing the rest, takes

    max(queue + compute(held, m), load(m, n), queue + copy(m, n)) + compute(n, end)

where `queue` is what the engine does before this prompt. Loading begins at once. Copying into the pool has to
wait for blocks there, and goes on while later ones are loaded.

For one n the maximum's first part rises with m and the others fall, so the best m is where they meet. As n
grows, a path costs nothing as long as others take longer. Beyond that, loading the next block may be faster
than computing it, and it stays so, since a later token costs at least what an earlier one does. Else only
computing from the left into the path itself can pay. So n is looked for where a path stops being hidden by
what is before it, and at its end.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import msgspec

from baton.core.store import FoundSpan, Tier

ENDS_MAX = 8
"""Changes of path that are tried, evenly spread if there are more: planning takes a millisecond."""
GAIN_MIN_S = 0.001
GAIN_SHARE_MIN = 0.03
"""Loading must be better than computing by this share of what computing would take: no prediction is
exact."""
SMOOTHING = 0.2
"""The weight of the newest measurement."""
BIAS_MIN, BIAS_MAX = 0.25, 16.0

ComputeSeconds = Callable[[int, int], float]
"""Predicted seconds for the prompt's positions [start, end), in tokens."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A prompt to compute, and what the engine does before it."""

    held_count: int
    block_tokens: int
    token_count: int
    compute_s: ComputeSeconds
    queue_s: float = 0.0

    def blocks_s(self, first: int, end: int) -> float:
        return self.compute_s(first * self.block_tokens, end * self.block_tokens)

    def rest_s(self, first: int) -> float:
        """The time for everything from block `first` on."""
        return self.compute_s(first * self.block_tokens, self.token_count)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load blocks [first, end); compute what is before and after them."""

    first: int
    end: int
    total_s: float
    """The predicted time until the whole prompt is computed."""
    load_s: float
    """The part of it until the last block is in the arena."""
    computing_s: float
    """The time that computing everything would take instead."""
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Load nothing."""

    reason: str
    computing_s: float


class Paths:
    """Where a chain's blocks are, counted from the first one that the pool lacks."""

    def __init__(self, spans: Sequence[FoundSpan]) -> None:
        self.starts = [0, *accumulate(span.block_count for span in spans)]
        """The start of each span, and the end of the last."""
        self._tier_of = [span.tier for span in spans]
        self._wait_s: dict[Tier, float] = {}
        self._block_s: dict[Tier, float] = {}
        self._before: dict[Tier, list[int]] = {}
        """Blocks of the tier before each of `starts`."""
        for span in spans:
            self._wait_s[span.tier] = max(self._wait_s.get(span.tier, 0.0), span.wait_s)
            self._block_s[span.tier] = max(self._block_s.get(span.tier, 0.0), span.block_s)
        for tier in self._wait_s:
            counts = (span.block_count if span.tier is tier else 0 for span in spans)
            self._before[tier] = [0, *accumulate(counts)]

    @property
    def block_count(self) -> int:
        return self.starts[-1]

    def seconds(self, first: int, end: int) -> Mapping[Tier, float]:
        """The seconds that each path is said to take for its part of [first, end). Paths work beside each
        other."""
        found: dict[Tier, float] = {}
        for tier in self._before:
            count = self._count_before(tier, end) - self._count_before(tier, first)
            if count > 0:
                found[tier] = self._wait_s[tier] + count * self._block_s[tier]
        return found

    def _count_before(self, tier: Tier, position: int) -> int:
        i = bisect_right(self.starts, position) - 1
        partly = position - self.starts[i] if i < len(self._tier_of) and self._tier_of[i] is tier else 0
        return self._before[tier][i] + partly


ANSWER_S = 0.001
COPY_BLOCK_S = 1e-4
KEPT = 0.9


@dataclass(slots=True)
class PathTimes:
    """What loading and copying took, against what was said before. It is learnt online."""

    answer_s: float = ANSWER_S
    """The time from asking to the first block, when nothing must be moved."""
    copy_block_s: float = COPY_BLOCK_S
    bias: dict[Tier, float] = field(default_factory=dict[Tier, float])
    """Actual over predicted seconds of the slowest path of a load."""
    predicted_s: float = 0.0
    """Sums over all loads that ended well, to compare."""
    actual_s: float = 0.0

    def load_s(self, paths: Paths, first: int, end: int) -> float:
        """The time until blocks [first, end) are in the arena."""
        predicted = paths.seconds(first, end).items()
        return self.answer_s + max(
            (self.bias.get(tier, 1.0) * path_s for tier, path_s in predicted), default=0.0
        )

    def copied(self, block_count: int, seconds: float) -> None:
        self.copy_block_s += SMOOTHING * (seconds / block_count - self.copy_block_s)

    def loaded(self, paths: Paths, first: int, end: int, seconds: float) -> None:
        """Learn that [first, end) were all in the arena `seconds` after they had been asked for."""
        self.predicted_s += self.load_s(paths, first, end)
        self.actual_s += seconds
        predicted = paths.seconds(first, end)
        slowest = max(predicted, key=lambda tier: self.bias.get(tier, 1.0) * predicted[tier], default=None)
        if slowest is None or predicted[slowest] <= 0.0:
            self.answer_s += SMOOTHING * (seconds - self.answer_s)
            return
        ratio = max(0.0, seconds - self.answer_s) / predicted[slowest]
        old = self.bias.get(slowest, 1.0)
        self.bias[slowest] = min(BIAS_MAX, max(BIAS_MIN, old + SMOOTHING * (ratio - old)))

    def not_tried(self) -> None:
        """Note that something was found, and computing was predicted to be as fast. Estimates of the paths go
        a little back to where they began, so that no path is avoided for ever for what it once was."""
        self.bias = {tier: 1.0 + KEPT * (bias - 1.0) for tier, bias in self.bias.items()}
        self.answer_s = ANSWER_S + KEPT * (self.answer_s - ANSWER_S)
        self.copy_block_s = COPY_BLOCK_S + KEPT * (self.copy_block_s - COPY_BLOCK_S)


def plan_load(
    spans: Sequence[FoundSpan], prompt: PromptWork, times: PathTimes, *, always: bool = False
) -> LoadPlan | Recompute:
    """Plan a prompt. `spans` begin at block `prompt.held_count`, and end before the prompt's last token.
    `always` loads everything, however long it takes."""
    if not spans:
        return Recompute("nothing found", prompt.queue_s + prompt.rest_s(prompt.held_count))
    ways = _Ways(Paths(spans), prompt, times)
    if always:
        return ways.plan(prompt.held_count, prompt.held_count + ways.paths.block_count)
    best = ways.best()
    missing_s = prompt.blocks_s(prompt.held_count, best.end)
    if best.total_s + max(GAIN_MIN_S, GAIN_SHARE_MIN * missing_s) >= best.computing_s:
        return Recompute("computing is as fast", best.computing_s)
    return best


def first_blocks(spans: Sequence[FoundSpan], count: int) -> tuple[FoundSpan, ...]:
    """The spans of the first `count` blocks, whatever a node says beyond."""
    left: list[FoundSpan] = []
    for span in spans:
        if (taken := min(count, span.block_count)) > 0:
            left.append(msgspec.structs.replace(span, block_count=taken))
            count -= taken
    return tuple(left)


def from_block(spans: Sequence[FoundSpan], count: int) -> tuple[FoundSpan, ...]:
    """The spans without the first `count` blocks."""
    left: list[FoundSpan] = []
    for span in spans:
        skip = min(count, span.block_count)
        count -= skip
        if skip < span.block_count:
            left.append(msgspec.structs.replace(span, block_count=span.block_count - skip))
    return tuple(left)


@dataclass(frozen=True, slots=True)
class _Ways:
    """All ways to get one prompt computed."""

    paths: Paths
    prompt: PromptWork
    times: PathTimes

    def best(self) -> LoadPlan:
        plans = [self.plan(self._meeting_point(end), end) for end in self._ends()]
        return min(plans, key=lambda plan: (plan.total_s, plan.end - plan.first))

    def plan(self, first: int, end: int) -> LoadPlan:
        held = self.prompt.held_count
        return LoadPlan(
            first,
            end,
            total_s=self._until_s(first, end) + self.prompt.rest_s(end),
            load_s=self.times.load_s(self.paths, first - held, end - held),
            computing_s=self.prompt.queue_s + self.prompt.rest_s(held),
            tiers=tuple(self.paths.seconds(first - held, end - held)),
        )

    def _ends(self) -> list[int]:
        """Where loading may best end: spans' ends, and where a span stops being hidden."""
        starts = [self.prompt.held_count + start for start in self.paths.starts]
        every = -(-(len(starts) - 1) // ENDS_MAX)
        starts = [starts[0], *reversed(starts[:0:-every])]
        ends: list[int] = []
        for start, end in pairwise(starts):
            ends += [self._hidden_end(start, end), end]
        return [end for end in ends if end > self.prompt.held_count]

    def _until_s(self, first: int, end: int) -> float:
        """The time until everything before `end` is there, computed or loaded."""
        held, times = self.prompt.held_count, self.times
        computed_s = self.prompt.queue_s + self.prompt.blocks_s(held, first)
        if first >= end:
            return computed_s
        loaded_s = times.load_s(self.paths, first - held, end - held) + times.copy_block_s
        copied_s = self.prompt.queue_s + times.copy_block_s * (end - first)
        return max(computed_s, loaded_s, copied_s)

    def _meeting_point(self, end: int) -> int:
        """The m before `end` for which computing up to m and loading from there on are done soonest."""
        held = self.prompt.held_count
        low, high = held, end
        while low < high:  # the first m where computing is the slower one
            middle = (low + high) // 2
            if self._until_s(middle, end) <= self.prompt.queue_s + self.prompt.blocks_s(held, middle):
                high = middle
            else:
                low = middle + 1
        candidates = [m for m in (low - 1, low) if held <= m < end]
        return min(candidates, key=lambda m: (self._until_s(m, end), m), default=end)

    def _hidden_end(self, start: int, end: int) -> int:
        """How far blocks from `start` on come while what is before them is still on its way."""
        first = self._meeting_point(start)
        until_s = self._until_s(first, start)
        low, high = start, end
        while low < high:
            middle = (low + high + 1) // 2
            if self._until_s(first, middle) <= until_s:
                low = middle
            else:
                high = middle - 1
        return low
