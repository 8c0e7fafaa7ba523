"""The order in which sequences get their turn: priorities, fairness between clients, short prompts before
long ones. Nobody starves.

At least one of every `OLDEST_EVERY` sequences admitted is the oldest that waits, whatever its priority,
length or client. A sequence that finds m others waiting is therefore admitted after at most OLDEST_EVERY · (m
+ 1) admissions, and a prompt that runs gets every `OLDEST_EVERY`-th step's chunk.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from baton.core.ids import tenant_of

OLDEST_EVERY = 4
PRIORITY_AGE_S = 5.0
"""Waiting this long raises a sequence by one priority, up to the best of those present."""
FAIR_QUANTUM_TOKENS = 512
"""Clients whose service differs by less count as served alike: then the shorter prompt goes first."""
GENERATED_TOKEN_COST = 2
"""A generated token counts as so many prompt tokens (as in the paper below)."""

Rank = tuple[int, tuple[int, int], int, int]
"""Lower goes first: priority, service its tenant and its client had, power of two of the tokens to compute,
age."""


class Ranked(Protocol):
    """Facts about a sequence that the order needs. A worker's is `engine.scheduling.sequence.Sequence`."""

    @property
    def priority(self) -> int: ...

    @property
    def fairness_key(self) -> str: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def order(self) -> int: ...

    @property
    def generated_here(self) -> bool: ...

    @property
    def pending_count(self) -> int: ...


class VirtualTokenCounters:
    """Service each client had, in prompt tokens; the one that had least goes first. A client that comes
    (back) starts where the least served of those present is, so it can save up nothing while idle.

    Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
    """

    def __init__(self) -> None:
        self._present: Counter[str] = Counter()
        self._served: dict[str, int] = {}

    def join(self, client: str) -> None:
        if not self._present[client]:
            self._served[client] = min(self._served.values(), default=0)
        self._present[client] += 1

    def leave(self, client: str) -> None:
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client], self._served[client]

    def charge(self, client: str, tokens: int) -> None:
        self._served[client] += tokens

    def level(self, client: str) -> int:
        return self._served[client] // FAIR_QUANTUM_TOKENS


class TwoLevels:
    """Tenants share the engine, and each one's clients what it gets: nobody has more for asking under many
    names. Clients are given by their fairness keys, see `baton.core.ids.fairness_key`."""

    def __init__(self) -> None:
        self._tenants, self._clients = VirtualTokenCounters(), VirtualTokenCounters()

    def join(self, client: str) -> None:
        self._tenants.join(tenant_of(client))
        self._clients.join(client)

    def leave(self, client: str) -> None:
        self._tenants.leave(tenant_of(client))
        self._clients.leave(client)

    def charge(self, client: str, tokens: int) -> None:
        self._tenants.charge(tenant_of(client), tokens)
        self._clients.charge(client, tokens)

    def level(self, client: str) -> tuple[int, int]:
        return self._tenants.level(tenant_of(client)), self._clients.level(client)


class TurnOrder:
    """Ranks sequences at one moment after another."""

    def __init__(self) -> None:
        self.shares = TwoLevels()
        self._now_s = 0.0
        self._best_priority = 0

    def at(self, now_s: float, present: Iterable[Ranked]) -> None:
        """Ranks from here on are of this moment; `present`: all that wait or run."""
        self._now_s = now_s
        self._best_priority = min((seq.priority for seq in present), default=0)

    def rank(self, seq: Ranked) -> Rank:
        # A client that is being streamed to goes before prompts that nobody has heard of yet.
        bucket = 0 if seq.generated_here else seq.pending_count.bit_length()
        return (self.level(seq), self.shares.level(seq.fairness_key), bucket, seq.order)

    def standing(self, seq: Ranked) -> tuple[int, int]:
        """Sort key for preemption. The sequence with the highest one gives way first when blocks are
        short."""
        return (self.level(seq), seq.order)

    def level(self, seq: Ranked) -> int:
        aged = seq.priority - int(max(0.0, self._now_s - seq.arrived_s) / PRIORITY_AGE_S)
        return max(self._best_priority, aged)
