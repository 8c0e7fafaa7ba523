"""Tenants take turns: next is the one that had least service for its weight.

Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A tenant that
comes (back) to the line is lifted to the least counter of those waiting, or where nobody waits to that of
the last one that did: it can save up nothing while it is away, and loses nothing that it is owed while it
waits.
"""

GENERATED_TOKEN_COST = 2.0
"""A generated token counts as so many prompt tokens (as in the paper, and as in the engine)."""
ABSENT_MAX = 4096
"""Tenants remembered that neither wait nor are behind the others."""


class FairShares:
    def __init__(self) -> None:
        self._waiting: dict[str, float] = {}
        """Weights of tenants that wait."""
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        """Never falls: no tenant that comes starts below it."""

    def came(self, tenant: str, weight: float, credit_tokens: float = 0.0) -> None:
        """It has a sequence waiting, and had none before. As far as it had less than the others meanwhile, it
        may have up to `credit_tokens` more now: requests come in bursts, and who asks for less than its share
        should not wait as if it had a share's worth of machine to itself."""
        assert tenant not in self._waiting
        assert weight > 0
        self._lift_floor()
        self._waiting[tenant] = weight
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor - credit_tokens / weight)

    def left(self, tenant: str) -> None:
        """It has none waiting any more."""
        self._lift_floor()
        del self._waiting[tenant]
        if not self._waiting:
            self._floor = max(self._floor, self._counters[tenant])
        self._forget_absent()

    def charge(self, tenant: str, tokens: float, weight: float) -> None:
        """It was served so much: prompt tokens computed, or generated ones at `GENERATED_TOKEN_COST`."""
        self._counters[tenant] = self._counters.get(tenant, self._floor) + tokens / weight

    def level(self, tenant: str) -> float:
        """The lowest goes first."""
        return self._counters.get(tenant, self._floor)

    def part_of(self, tenant: str, weight: float) -> float:
        """The share of service that a tenant may expect while all those that wait now go on waiting."""
        others = sum(w for t, w in self._waiting.items() if t != tenant)
        return weight / (weight + others)

    def _lift_floor(self) -> None:
        if self._waiting:
            self._floor = max(self._floor, min(self._counters[t] for t in self._waiting))

    def _forget_absent(self) -> None:
        """A tenant at the floor or below starts there anyway, and these are forgotten first."""
        if len(self._counters) <= ABSENT_MAX + len(self._waiting):
            return
        absent = sorted((c, t) for t, c in self._counters.items() if t not in self._waiting)
        for _, tenant in absent[: max(len(absent) // 2, 1)]:
            del self._counters[tenant]

    def check(self) -> None:
        assert self._waiting.keys() <= self._counters.keys()
