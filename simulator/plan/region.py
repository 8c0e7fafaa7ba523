"""Clusters of one kind: which of them are known to fail, which may still be cheaper than another one."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil, log

from baton.core.messages import Role
from simulator.plan.clusters import ClusterKind, ClusterVerdict, Counts

REPLICAS_MAX = 4096
"""Most replicas of all pools together: a router follows no more workers."""
SLACK = 0.02
"""Share of requests that chance may cost. More replicas serve better otherwise, so a cluster that missed the
goal by less says nothing of smaller ones."""
GROWTH = 1.5
SHORT = 1.25
"""A pool that was too small is believed to need so many times its replicas."""
VAIN_GROWTH = 4.0
"""A kind that has so many times the replicas it began with and serves no better will not serve by growing."""
GAIN_MIN = 0.005
"""Share of requests that counts as a gain; less is chance."""
CENT = 1e-6
"""Prices that differ by less are the same."""


class Region:
    """The verdicts on one kind, and what follows from them."""

    def __init__(self, kind: ClusterKind, *, attain: float) -> None:
        self.kind = kind
        self._attain = attain
        self.verdicts: dict[Counts, ClusterVerdict] = {}
        self._failed: list[Counts] = []
        """Counts that failed clearly, so that whatever has no more of any pool fails too. None lies below
        another."""
        self._short: dict[Role, int] = {}
        """The largest pool of each role that was found too small."""
        self._grown: Counts | None = kind.estimate if sum(kind.estimate) <= REPLICAS_MAX else None
        """Counts to try next as long as nothing passed."""
        self._gained = (-1.0, sum(kind.estimate))
        """The best `so_far`, and with how many replicas it came."""

    def passes(self, counts: Counts) -> bool:
        verdict = self.verdicts.get(counts)
        return verdict is not None and not verdict.aborted and verdict.met >= self._attain

    def learn(self, counts: Counts, verdict: ClusterVerdict) -> bool:
        """Take a verdict; return whether the cluster passes."""
        self.verdicts[counts] = verdict
        if self.passes(counts):
            return True
        index = self._lacking(verdict)
        role = self.kind.shapes[index][0]
        self._short[role] = max(self._short.get(role, 0), counts[index])
        if self.is_clear(verdict):
            self.rule_out(counts)
        if self._grown is not None and counts == self._grown:
            self._grow(counts, index, verdict)
        return False

    def is_clear(self, verdict: ClusterVerdict) -> bool:
        """Return whether a cluster failed in such a way that whatever is smaller would fail, too."""
        return verdict.aborted or verdict.met < self._attain - SLACK

    def rule_out(self, counts: Counts) -> None:
        """Rule out a cluster and whatever has no more of any pool."""
        self._failed = [c for c in self._failed if not _is_within(c, counts)] + [counts]

    def _lacking(self, verdict: ClusterVerdict) -> int:
        """Return the pool whose objective was missed more often."""
        if len(self.kind.shapes) == 1:
            return 0
        return 0 if verdict.ttft_met <= verdict.tpot_met else 1

    def _grow(self, counts: Counts, index: int, verdict: ClusterVerdict) -> None:
        best, replicas = self._gained
        if verdict.so_far > best + GAIN_MIN:
            self._gained = best, replicas = verdict.so_far, sum(counts)
        grown = list(counts)
        grown[index] = ceil(counts[index] * GROWTH)
        is_vain = sum(grown) > VAIN_GROWTH * replicas + 2
        self._grown = None if is_vain or sum(grown) > REPLICAS_MAX else tuple(grown)

    def grown(self) -> Counts | None:
        """Return the next cluster to try until one passes; None when growing does not help."""
        while self._grown is not None and self.is_ruled_out(self._grown):  # by a faster kind
            self._grown = tuple(ceil(count * GROWTH) for count in self._grown)
            if sum(self._grown) > REPLICAS_MAX:
                self._grown = None
        return self._grown

    def is_ruled_out(self, counts: Counts) -> bool:
        """Return whether a cluster is ruled out by what was simulated or by the work alone."""
        if min(counts) < 1 or not self.kind.can_do_the_work(counts):
            return True
        return any(_is_within(counts, failed) for failed in self._failed)

    def is_open(self, counts: Counts) -> bool:
        return counts not in self.verdicts and not self.is_ruled_out(counts)

    def open_below(self, price: float) -> Iterator[Counts]:
        """Yield the largest clusters cheaper than `price` (dollars per hour) that may still pass. When there
        are none, no cheaper cluster of this kind passes."""
        *heads, last_price = self.kind.prices
        spans = [range(1, min(REPLICAS_MAX, int(price / each) + 1)) for each in heads]
        for head in product(*spans):
            left = price - CENT - sum(n * each for n, each in zip(head, heads, strict=True))
            most = min(int(left / last_price), REPLICAS_MAX - sum(head)) if left > 0 else 0
            for last in range(most, 0, -1):
                counts = (*head, last)
                if self.is_ruled_out(counts):
                    break
                if counts not in self.verdicts:
                    yield counts
                    break

    def between(self, counts: Counts) -> Counts | None:
        """Return the cluster halfway from one that passes to the smallest that may, in one pool, the dearest
        first; None when no pool alone can be smaller."""
        by_price = sorted(range(len(counts)), key=lambda i: -counts[i] * self.kind.prices[i])
        for index in by_price:
            low = counts[index] - 1
            while low > 0 and self.is_open(_with(counts, index, low)):
                low -= 1
            if counts[index] - low > 1:
                return _with(counts, index, (low + counts[index]) // 2)
        return None

    def smaller(self, counts: Counts) -> Iterator[Counts]:
        """Yield clusters with one replica less of one pool that were not simulated yet."""
        for index, count in enumerate(counts):
            less = _with(counts, index, count - 1)
            if count > 1 and less not in self.verdicts:
                yield less

    def wanted(self, bias: Mapping[Role, float]) -> tuple[float, ...]:
        """Return the replicas that each pool is believed to need. `bias` says by how much phases were wrong
        elsewhere."""
        believed: list[float] = []
        for (role, _), estimate in zip(self.kind.shapes, self.kind.estimate, strict=True):
            believed.append(max(1.0, estimate * bias.get(role, 1.0), SHORT * self._short.get(role, 0)))
        return tuple(believed)

    def likeliest_below(self, price: float, bias: Mapping[Role, float]) -> Counts | None:
        """Return the one of `open_below` whose scarcest pool is the least scarce."""
        wanted = self.wanted(bias)

        def scarcity(counts: Counts) -> float:
            return max(log(need / count) for need, count in zip(wanted, counts, strict=True))

        return min(self.open_below(price), key=scarcity, default=None)


def _with(counts: Counts, index: int, count: int) -> Counts:
    return (*counts[:index], count, *counts[index + 1 :])


def _is_within(counts: Counts, other: Counts) -> bool:
    """Return whether a cluster has no more of any pool than another."""
    return all(one <= two for one, two in zip(counts, other, strict=True))
