"""Prompts that were sent to one worker and are not computed yet, in the order in which it takes them."""

from typing import NamedTuple

BUCKETS = 32


class Sum(NamedTuple):
    tokens: int
    pairs: int
    prompts: int


NOTHING = Sum(0, 0, 0)


def bucket_of(token_count: int) -> int:
    """As `engine.scheduling.order` ranks prompts: those of fewer binary digits go first."""
    return min(BUCKETS - 1, token_count.bit_length())


class _Level:
    __slots__ = ("counts", "pairs", "tokens")

    def __init__(self) -> None:
        self.tokens = [0] * BUCKETS
        self.pairs = [0] * BUCKETS
        self.counts = [0] * BUCKETS


class Backlog:
    """By priority (lower first), then by the power of two of the prompt's length, cached part included: a
    worker does not know what it has cached before it admits a prompt."""

    __slots__ = ("_levels", "count", "full_tokens", "pairs", "tokens")

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self.tokens = self.pairs = self.count = 0
        """To compute, over all."""
        self.full_tokens = 0
        """Cached ones included."""

    def add(self, *, priority: int, full_tokens: int, tokens: int, pairs: int) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        self._count(level, bucket_of(full_tokens), tokens, pairs, 1)
        self.full_tokens += full_tokens

    def remove(self, *, priority: int, full_tokens: int, tokens: int, pairs: int) -> None:
        """What was added with the same figures."""
        level = self._levels[priority]
        self._count(level, bucket_of(full_tokens), -tokens, -pairs, -1)
        self.full_tokens -= full_tokens
        if not any(level.counts):
            del self._levels[priority]

    def _count(self, level: _Level, bucket: int, tokens: int, pairs: int, count: int) -> None:
        level.tokens[bucket] += tokens
        level.pairs[bucket] += pairs
        level.counts[bucket] += count
        self.tokens += tokens
        self.pairs += pairs
        self.count += count

    def ahead(self, priority: int, full_tokens: int) -> Sum:
        """What runs before a prompt of that length that comes now."""
        if not self.count:
            return NOTHING
        end = bucket_of(full_tokens) + 1
        tokens = pairs = count = 0
        for level_priority, level in self._levels.items():
            if level_priority == priority:
                tokens += sum(level.tokens[:end])
                pairs += sum(level.pairs[:end])
                count += sum(level.counts[:end])
            elif level_priority < priority:
                tokens += sum(level.tokens)
                pairs += sum(level.pairs)
                count += sum(level.counts)
        return Sum(tokens, pairs, count)

    def head(self) -> Sum:
        """Of those that go first, on average one."""
        if not self.count:
            return NOTHING
        level = self._levels[min(self._levels)]
        bucket = next(i for i, count in enumerate(level.counts) if count)
        count = level.counts[bucket]
        return Sum(level.tokens[bucket] // count, level.pairs[bucket] // count, 1)

    @property
    def sums(self) -> tuple[int, int, int, int]:
        return self.tokens, self.pairs, self.count, self.full_tokens
