"""How fast KV moves between hosts, and how many tokens answers have: what is learnt over the whole fleet."""

from collections.abc import Hashable
from math import inf

RATE_FIRST = 2e9
"""Bytes per second, before any transfer was seen."""
RATE_MIN, RATE_MAX = 1.0, 1e13
TRANSFER_MIN_S = 1e-9
HANDOVER_FIRST_S = 0.005
WEIGHT = 0.1
LINKS_MAX = 4096
WEIGH_BYTES_MIN = 64 * 1024
"""A smaller transfer says more of its latency than of the rate."""


class _Link:
    __slots__ = ("handover_s", "rate")

    def __init__(self, rate: float, handover_s: float) -> None:
        self.rate = rate
        self.handover_s = handover_s


class Links:
    """Rates per (source host, destination host). A link that was never used is taken to be like the average
    of all."""

    def __init__(self) -> None:
        self._links: dict[Hashable, _Link] = {}
        self._all = _Link(RATE_FIRST, HANDOVER_FIRST_S)

    def observe(
        self, link: Hashable, *, transferred_bytes: int, transfer_s: float, handover_s: float
    ) -> None:
        """`handover_s`: from the last grant to joining the batch."""
        found = self._links.get(link)
        if found is None:
            if len(self._links) >= LINKS_MAX:
                del self._links[next(iter(self._links))]
            found = self._links[link] = _Link(self._all.rate, self._all.handover_s)
        for one in (found, self._all):
            if transferred_bytes >= WEIGH_BYTES_MIN and transfer_s > 0:
                rate = transferred_bytes / max(transfer_s, TRANSFER_MIN_S)
                rate = max(RATE_MIN, min(RATE_MAX, rate))
                one.rate += WEIGHT * (rate - one.rate)
            if not 0.0 <= handover_s < inf:
                continue
            # A hand-over that waited for room says nothing of the link.
            one.handover_s += WEIGHT * (min(handover_s, 10 * one.handover_s + 1e-3) - one.handover_s)

    def exposed_s(self, link: Hashable, *, total_bytes: float, last_bytes: float, hidden_s: float) -> float:
        """Return the seconds from the first token to the decode worker's batch: the last chunk, what did not
        fit into the time to compute the others (`hidden_s`), and the latency of a hand-over."""
        found = self._links.get(link, self._all)
        late_s = (total_bytes - last_bytes) / found.rate - hidden_s
        return max(found.handover_s, last_bytes / found.rate) + max(0.0, late_s)


LENGTH_FIRST = 128.0
LENGTH_WEIGHT = 0.02


class OutputLengths:
    """Tokens of an answer, on average; answers are taken to be memoryless, so what remains of one that
    runs is the same."""

    def __init__(self) -> None:
        self._mean = LENGTH_FIRST
        self._count = 0

    def observe(self, generated_count: int) -> None:
        self._count += 1
        weight = max(LENGTH_WEIGHT, 1.0 / (self._count + 1))
        self._mean += weight * (generated_count - self._mean)

    def expected(self, tokens_max: int) -> float:
        """Expected tokens of an answer that may have `tokens_max` at most; at least 1."""
        return max(1.0, min(self._mean, float(tokens_max)))

    @property
    def mean(self) -> float:
        return max(1.0, self._mean)
