"""The schedule of faults of one seed. Pure: a seed and the options go in, events come out."""

import random
from collections.abc import Collection, Iterator
from enum import StrEnum
from itertools import permutations

import msgspec

FIRST, SECOND, THIRD = "first", "second", "third"
HOSTS = (FIRST, SECOND, THIRD)
"""Hosts of the cluster. The first runs Redis, Ray's head, the control plane and its dashboard. The first and
the second have a router and a store node each. Workers run on all of them."""

ROUTERS = {"router-1": FIRST, "router-2": SECOND}
STORES = {"store-1": FIRST, "store-2": SECOND}
WORKER, CONTROL, DASHBOARD, REDIS = "worker", "control plane", "dashboard", "redis"
PROCESSES = (*ROUTERS, *STORES, CONTROL, DASHBOARD, REDIS)
"""Processes that faults name. Workers are chosen among those that run when the fault is due."""


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL of a process; its supervisor starts it again."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT later."""
    LOSE_HOST = "lose-host"
    """All processes of a host get SIGKILL at once, and the host comes back empty."""
    FILL_DISK = "fill-disk"
    """The file system of a store node's SSD files has no room left for a while."""
    CUT = "cut"
    """No packet passes between two hosts, in either direction."""
    ONE_WAY = "one-way"
    """No packet passes from one host to another; those in the other direction arrive."""
    SLOW = "slow"
    """The link between two hosts has a small bandwidth, and long queues."""
    CLOCK = "clock"
    """The wall clock of a host steps; it stays wrong until its next step."""
    FLUSH = "flush"
    """Redis forgets everything."""
    DRAIN = "drain"
    """An operator drains a worker."""
    SWITCH = "switch-role"
    """An operator gives a worker the other role, and the old one back later."""
    ROLL_OUT = "roll-out"
    """An operator replaces all workers by another version."""


class Event(msgspec.Struct, frozen=True):
    number: int
    at_s: float
    """Seconds since the first planned request."""
    fault: FaultKind
    target: str
    """A process, a host, a link `a-b`, or a direction `a>b`. Empty for the whole cluster."""
    for_s: float = 0.0
    """The time until it is undone. 0 means that nothing has to be undone."""
    amount: float = 0.0
    """Seconds of a clock's step, or kbit/s of a slow link."""
    pick: int = 0
    """Chooses among the workers that run when the fault is due."""

    @property
    def ends_s(self) -> float:
        return self.at_s + self.for_s

    @property
    def text(self) -> str:
        what = {
            FaultKind.CLOCK: f"by {self.amount:+.0f} s",
            FaultKind.SLOW: f"to {self.amount:.0f} kbit/s",
        }.get(self.fault, "")
        lasts = f"for {self.for_s:.1f} s" if self.for_s else ""
        return " ".join(part for part in (self.fault.value, self.target, what, lasts) if part)


class FaultCard(msgspec.Struct, frozen=True):
    """One fault that may be drawn, with the bounds of its length."""

    fault: FaultKind
    target: str
    for_s: tuple[float, float] = (0.0, 0.0)


SHORT_S, LONG_S = (0.3, 2.0), (9.0, 14.0)
"""Shorter than the time after which a silent worker is suspected, and longer than every lease."""
DISK_S, SLOW_S, SWITCHED_S = (5.0, 15.0), (5.0, 20.0), (15.0, 30.0)
CLOCK_STEP_S = (2.0, 3600.0)
SLOW_KBITS = (256.0, 2048.0)
LINKS = tuple(f"{a}-{b}" for i, a in enumerate(HOSTS) for b in HOSTS[i + 1 :])
DIRECTIONS = tuple(f"{a}>{b}" for a, b in permutations(HOSTS, 2))


def deck() -> tuple[FaultCard, ...]:
    """Every fault as often as it shall be drawn before any is drawn again."""
    return (
        *(FaultCard(FaultKind.KILL, WORKER) for _ in range(4)),
        *(FaultCard(FaultKind.KILL, name) for name in PROCESSES),
        *(FaultCard(FaultKind.FREEZE, WORKER, length) for length in (SHORT_S, SHORT_S, LONG_S, LONG_S)),
        *(FaultCard(FaultKind.FREEZE, name, SHORT_S) for name in PROCESSES),
        *(FaultCard(FaultKind.FREEZE, name, LONG_S) for name in (*ROUTERS, *STORES, CONTROL, REDIS)),
        *(FaultCard(FaultKind.LOSE_HOST, host) for host in HOSTS[1:]),
        *(FaultCard(FaultKind.FILL_DISK, name, DISK_S) for name in STORES),
        *(FaultCard(FaultKind.CUT, link, length) for link in LINKS for length in (SHORT_S, LONG_S)),
        *(FaultCard(FaultKind.ONE_WAY, way, LONG_S) for way in DIRECTIONS),
        *(FaultCard(FaultKind.SLOW, link, SLOW_S) for link in LINKS),
        *(FaultCard(FaultKind.CLOCK, host) for host in HOSTS),
        *(FaultCard(FaultKind.FLUSH, REDIS) for _ in range(2)),
        *(FaultCard(FaultKind.DRAIN, WORKER) for _ in range(2)),
        FaultCard(FaultKind.SWITCH, WORKER, SWITCHED_S),
        FaultCard(FaultKind.ROLL_OUT, ""),
    )


def draw(
    seed: int,
    *,
    length_s: float,
    every_s: float,
    faults: Collection[FaultKind] = tuple(FaultKind),
    quiet_s: tuple[float, float] = (5.0, 15.0),
) -> tuple[Event, ...]:
    """The events of a seed in the order of their instants.

    Gaps between faults are exponential with mean `every_s`, between a quarter and three times of it. Nothing
    begins in the first and last seconds of `quiet_s`. The same arguments give the same events.
    """
    rng = random.Random(f"chaos {seed}")
    events: list[Event] = []
    at_s = quiet_s[0]
    for card in _cards(rng, [card for card in deck() if card.fault in faults]):
        if at_s >= length_s - quiet_s[1]:
            break
        events.append(_event(rng, len(events) + 1, at_s, card))
        at_s += min(max(rng.expovariate(1 / every_s), every_s / 4), 3 * every_s)
    return tuple(events)


def _cards(rng: random.Random, cards: list[FaultCard]) -> Iterator[FaultCard]:
    """All cards in a random order, then all in another, without an end."""
    while cards:
        yield from rng.sample(cards, len(cards))


def _event(rng: random.Random, number: int, at_s: float, card: FaultCard) -> Event:
    for_s, amount = rng.uniform(*card.for_s), 0.0
    if card.fault is FaultKind.CLOCK:
        amount = rng.choice((-1, 1)) * rng.uniform(*CLOCK_STEP_S)
    elif card.fault is FaultKind.SLOW:
        amount = rng.uniform(*SLOW_KBITS)
    pick = rng.randrange(1 << 16)
    return Event(number, round(at_s, 1), card.fault, card.target, round(for_s, 1), round(amount), pick)
