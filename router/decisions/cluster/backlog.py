"""The prompts that were sent to one worker and are not computed yet, in the order in which it takes them."""

from typing import NamedTuple

BUCKETS = 32
ZEROS = (0,) * BUCKETS


class PromptSum(NamedTuple):
    """Sums over prompts: tokens to compute, pairs of tokens that attention reads, and prompts."""

    tokens: int
    pairs: int
    prompts: int


NOTHING = PromptSum(0, 0, 0)


def bucket_of(token_count: int) -> int:
    """Workers rank prompts alike (`engine.scheduling.order`): those of fewer binary digits go first."""
    return min(BUCKETS - 1, token_count.bit_length())


class _Level(NamedTuple):
    """The prompts of one priority, summed by bucket of length."""

    tokens: tuple[int, ...] = ZEROS
    pairs: tuple[int, ...] = ZEROS
    counts: tuple[int, ...] = ZEROS

    def plus(self, bucket: int, tokens: int, pairs: int, count: int) -> "_Level":
        return _Level(
            _plus(self.tokens, bucket, tokens),
            _plus(self.pairs, bucket, pairs),
            _plus(self.counts, bucket, count),
        )


def _plus(sums: tuple[int, ...], bucket: int, more: int) -> tuple[int, ...]:
    changed = list(sums)
    changed[bucket] += more
    return tuple(changed)


EMPTY_LEVEL = _Level()


class Backlog(NamedTuple):
    """Prompts are summed by priority (lower first), then by the power of two of their length with the cached
    part: a worker does not know what it has cached before it admits a prompt. A value: each change makes a
    new backlog, so that a snapshot holds one for nothing."""

    tokens: int = 0
    """All prompts together, cached tokens left out."""
    pairs: int = 0
    prompts: int = 0
    full_tokens: int = 0
    """All prompts together, cached tokens included."""
    levels: tuple[tuple[int, _Level], ...] = ()

    def plus(self, *, priority: int, full_tokens: int, tokens: int, pairs: int) -> "Backlog":
        """The backlog with one more prompt."""
        return self._changed(priority, full_tokens, tokens, pairs, 1)

    def minus(self, *, priority: int, full_tokens: int, tokens: int, pairs: int) -> "Backlog":
        """The backlog without a prompt that was added with the same figures."""
        return self._changed(priority, full_tokens, tokens, pairs, -1)

    def _changed(self, priority: int, full_tokens: int, tokens: int, pairs: int, sign: int) -> "Backlog":
        levels = dict(self.levels)
        level = levels.get(priority, EMPTY_LEVEL)
        level = level.plus(bucket_of(full_tokens), sign * tokens, sign * pairs, sign)
        if any(level.counts):
            levels[priority] = level
        else:
            del levels[priority]
        return Backlog(
            self.tokens + sign * tokens,
            self.pairs + sign * pairs,
            self.prompts + sign,
            self.full_tokens + sign * full_tokens,
            tuple(levels.items()),
        )

    def ahead(self, priority: int, full_tokens: int) -> PromptSum:
        """What runs before a prompt of that length that comes now."""
        if not self.prompts:
            return NOTHING
        end = bucket_of(full_tokens) + 1
        tokens = pairs = count = 0
        for level_priority, level in self.levels:
            if level_priority == priority:
                tokens += sum(level.tokens[:end])
                pairs += sum(level.pairs[:end])
                count += sum(level.counts[:end])
            elif level_priority < priority:
                tokens += sum(level.tokens)
                pairs += sum(level.pairs)
                count += sum(level.counts)
        return PromptSum(tokens, pairs, count)

    def head(self) -> PromptSum:
        """The average prompt of those that go first."""
        if not self.prompts:
            return NOTHING
        _, level = min(self.levels)
        bucket = next(i for i, count in enumerate(level.counts) if count)
        count = level.counts[bucket]
        return PromptSum(level.tokens[bucket] // count, level.pairs[bucket] // count, 1)
