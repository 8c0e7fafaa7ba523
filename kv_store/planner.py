"""Load, fetch or recompute: what of a cached prefix is worth bringing, in predicted seconds. Pure.

A chain of blocks, of which the first `held_count` are in the worker's pool and the next are on paths with a
queue and a speed each. Bringing blocks [m, n) while [held, m) are computed, then computing the rest, takes

    max(queue + compute(held, m), bring(m, n), queue + copy(m, n)) + compute(n, end)

where `queue` is what the engine does before this prompt. Bringing begins at once; copying into the pool has
to wait for blocks there, and goes on while later ones are brought.

For one n the maximum's first part rises with m and the others fall, so the best m is where they meet. Going
on to the end of a path that is worth its while never costs more, since computing a later token costs at least
what an earlier one does and the work is shared out anew: so n is looked for among the paths' ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.store import FoundSpan, Tier

SPANS_MAX = 64
"""Beyond so many changes of path the rest is computed."""
GAIN_MIN_S = 0.001
GAIN_SHARE_MIN = 0.03
"""Loading must be better than computing by so much, of what computing would take: no prediction is exact."""
SMOOTHING = 0.2
"""Weight of the newest measurement."""
BIAS_MIN, BIAS_MAX = 0.25, 16.0

ComputeSeconds = Callable[[int, int], float]
"""Of the prompt's positions [start, end), in tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be computed, and what the engine does before it."""

    held_count: int
    block_tokens: int
    token_count: int
    compute_s: ComputeSeconds
    queue_s: float = 0.0

    def blocks_s(self, first: int, end: int) -> float:
        return self.compute_s(first * self.block_tokens, end * self.block_tokens)

    def rest_s(self, first: int) -> float:
        """Everything from block `first` on."""
        return self.compute_s(first * self.block_tokens, self.token_count)


@dataclass(frozen=True, slots=True)
class Plan:
    """Bring blocks [first, end); compute what is before and after them."""

    first: int
    end: int
    total_s: float
    """Predicted, until the whole prompt is computed."""
    bring_s: float
    """Of it, until the last block is in the arena."""
    computing_s: float
    """What computing everything would take instead."""
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Bring nothing."""

    because: str
    computing_s: float


@dataclass(slots=True)
class PathTimes:
    """What bringing and copying took, against what was said before: learnt online."""

    answer_s: float = 0.001
    """From asking to the first block, when nothing must be brought."""
    copy_block_s: float = 1e-4
    bias: dict[Tier, float] = field(default_factory=dict[Tier, float])
    """Actual over predicted seconds of the slowest path of a load."""
    predicted_s: float = 0.0
    """Sums over all loads that ended well, to compare."""
    actual_s: float = 0.0

    def bring_s(self, spans: Sequence[FoundSpan], first: int, end: int) -> float:
        """Until blocks [first, end), counted from the first span's begin, are in the arena."""
        return self.answer_s + max(
            (self.bias.get(tier, 1.0) * said_s for tier, said_s in _paths(spans, first, end).items()),
            default=0.0,
        )

    def copied(self, block_count: int, seconds: float) -> None:
        self.copy_block_s += SMOOTHING * (seconds / block_count - self.copy_block_s)

    def brought(self, spans: Sequence[FoundSpan], first: int, end: int, seconds: float) -> None:
        """[first, end) were all in the arena `seconds` after they had been asked for."""
        self.predicted_s += self.bring_s(spans, first, end)
        self.actual_s += seconds
        paths = _paths(spans, first, end)
        slowest = max(paths, key=lambda tier: self.bias.get(tier, 1.0) * paths[tier], default=None)
        if slowest is None or paths[slowest] <= 0.0:
            self.answer_s += SMOOTHING * (seconds - self.answer_s)
            return
        ratio = max(0.0, seconds - self.answer_s) / paths[slowest]
        old = self.bias.get(slowest, 1.0)
        self.bias[slowest] = min(BIAS_MAX, max(BIAS_MIN, old + SMOOTHING * (ratio - old)))


def plan_load(
    spans: Sequence[FoundSpan], prompt: Prompt, times: PathTimes, *, always: bool = False
) -> Plan | Recompute:
    """`spans` begin at block `prompt.held_count`, and end before the prompt's last token. `always`: bring
    everything, however long it takes."""
    spans = spans[:SPANS_MAX]
    if always and spans:
        return _bring_all(spans, prompt, times)
    held = prompt.held_count
    computing_s = prompt.queue_s + prompt.rest_s(held)
    best: Plan | None = None
    end = held
    for number, span in enumerate(spans, 1):
        end += span.block_count
        first = _meeting_point(spans[:number], prompt, times, end)
        total_s = _until_s(spans, prompt, times, first, end) + prompt.rest_s(end)
        if first < end and (best is None or total_s < best.total_s):
            bring_s = times.bring_s(spans, first - held, end - held)
            tiers = tuple(_paths(spans, first - held, end - held))
            best = Plan(first, end, total_s, bring_s, computing_s, tiers)
    if best is None:
        return Recompute("nothing found", computing_s)
    missing_s = prompt.blocks_s(held, best.end)
    if best.total_s + max(GAIN_MIN_S, GAIN_SHARE_MIN * missing_s) >= computing_s:
        return Recompute("computing is as fast", computing_s)
    return best


def _bring_all(spans: Sequence[FoundSpan], prompt: Prompt, times: PathTimes) -> Plan:
    count = sum(span.block_count for span in spans)
    first, end = prompt.held_count, prompt.held_count + count
    return Plan(
        first,
        end,
        total_s=_until_s(spans, prompt, times, first, end) + prompt.rest_s(end),
        bring_s=times.bring_s(spans, 0, count),
        computing_s=prompt.queue_s + prompt.rest_s(first),
        tiers=tuple(_paths(spans, 0, count)),
    )


def _until_s(spans: Sequence[FoundSpan], prompt: Prompt, times: PathTimes, first: int, end: int) -> float:
    """Until everything before `end` is there, computed or brought."""
    held = prompt.held_count
    computed_s = prompt.queue_s + prompt.blocks_s(held, first)
    if first >= end:
        return computed_s
    brought_s = times.bring_s(spans, first - held, end - held) + times.copy_block_s
    copied_s = prompt.queue_s + times.copy_block_s * (end - first)
    return max(computed_s, brought_s, copied_s)


def _meeting_point(spans: Sequence[FoundSpan], prompt: Prompt, times: PathTimes, end: int) -> int:
    """The m for which computing up to m and bringing from there on are done soonest."""
    low, high = prompt.held_count, end
    while low < high:  # the first m where computing is the slower one
        middle = (low + high) // 2
        if _until_s(spans, prompt, times, middle, end) <= prompt.queue_s + prompt.blocks_s(
            prompt.held_count, middle
        ):
            high = middle
        else:
            low = middle + 1
    candidates = [m for m in (low - 1, low) if prompt.held_count <= m < end]
    return min(candidates, key=lambda m: (_until_s(spans, prompt, times, m, end), m), default=end)


def _paths(spans: Sequence[FoundSpan], first: int, end: int) -> Mapping[Tier, float]:
    """Said seconds of each path that brings some of [first, end); paths work beside each other."""
    found: dict[Tier, float] = {}
    start = 0
    for span in spans:
        count = min(end, start + span.block_count) - max(first, start)
        if count > 0:
            found[span.tier] = max(found.get(span.tier, 0.0), span.wait_s) + count * span.block_s
        start += span.block_count
    return found
