"""Circuit breakers: a worker that keeps failing gets no new sequence for a while. Pure.

    closed ──fails──▶ open ──its time is over──▶ half open ──a probe works──▶ closed
                       ▲                             │
                       └────── it fails, longer ─────┘

There is one breaker per replica name. It outlives sessions and restarts, so a process that keeps dying is
noticed. The router counts what it observes itself: attempts that failed or were refused, sessions that broke,
first tokens that were overdue, and workers whose steps take much longer than at their start while those of
their peers do not. As in Envoy's outlier detection, only part of a pool is kept out at once and never all of
it, because the fault is elsewhere if every worker fails.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum, auto
from statistics import median
from typing import NamedTuple

from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Role

WINDOW_EVENTS = 20
"""Number of recent attempts whose failure rate counts."""
WINDOW_SHARE = 0.5
"""Failure rate over these attempts that opens a breaker."""
FORGIVEN_AFTER = 10.0
"""A breaker that stayed closed for this many times its last open time starts with the shortest one again."""
SLOW_REPORTS = 4
"""Number of consecutive slow reports that open a breaker."""
CIRCUITS_MAX = 4096


class BreakerState(StrEnum):
    CLOSED = auto()
    OPEN = auto()
    """The worker gets no new sequence."""
    HALF_OPEN = auto()
    """The worker gets one sequence at a time as a probe."""


class Circuit:
    """The breaker of one replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        self.opened_s = self.closed_s = float("-inf")
        self.open_s = 0.0
        self.reason = ""
        self.in_a_row = 0
        self.recent: deque[bool] = deque(maxlen=WINDOW_EVENTS)
        self.slow_reports = 0
        self.slowness: float | None = None
        self.probe: SequenceId | None = None

    def state(self, now_s: float) -> BreakerState:
        if not self.is_open:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self.opened_s + self.open_s else BreakerState.HALF_OPEN

    def is_shut(self, now_s: float) -> bool:
        """Whether the worker gets no new sequence now."""
        state = self.state(now_s)
        return state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self.probe is not None)


class BreakerStatus(NamedTuple):
    state: BreakerState
    reason: str
    """Why the breaker opened last; empty if it never did."""


def replica_of(worker_id: WorkerId) -> str:
    """Return the replica name of a worker id, which is `NAME.LIFE`."""
    return worker_id.rpartition(".")[0] or worker_id


def slowness(costs: StepCosts | None, first: StepCosts | None) -> float | None:
    """Return the duration of a step relative to the worker's start; None if it is not known."""
    if costs is None or first is None:
        return None
    before_s = _standard_s(first)
    return _standard_s(costs) / before_s if before_s > 0 else None


def _standard_s(costs: StepCosts) -> float:
    """The cost of a typical step, by which two sets of costs are compared."""
    return costs.step_s(prompt_tokens=256, decodes=8, context_tokens=4096, pairs=65_536)


class Breakers:
    def __init__(self, config: RouterConfig) -> None:
        self._failures_max = config.breaker_failures
        self._open_s, self._open_max_s = config.breaker_open_s, config.breaker_open_max_s
        self._share_max = config.breaker_share_max
        self._slow_factor = config.breaker_slow_factor
        self._circuits: dict[str, Circuit] = {}
        self._probes: dict[SequenceId, set[str]] = {}
        self._open_names: set[str] = set()
        self._least_slowness = float("inf")
        """Lower bound of the slowness of all circuits."""
        self.opened_count = 0
        """Number of times that breakers opened since the start."""

    # --- what happens -----------------------------------------------------------------------------

    def failed(
        self,
        worker_id: WorkerId,
        reason: str,
        *,
        now_s: float,
        seq_id: SequenceId | None = None,
        is_refusal: bool = False,
    ) -> None:
        """Note that an attempt failed, or the session if `seq_id` is None.

        A refusal only says that the worker is full, so only many in a row count. While the breaker is half
        open, only its probe counts.
        """
        if not self._failures_max:
            return
        circuit = self._circuit(worker_id)
        state = circuit.state(now_s)
        is_old = state is BreakerState.HALF_OPEN and seq_id is not None and seq_id != circuit.probe
        if state is BreakerState.OPEN or is_old:
            return  # the attempt began before the breaker opened
        circuit.in_a_row += 1
        if not is_refusal:
            circuit.recent.append(False)
        if state is BreakerState.HALF_OPEN and not is_refusal:
            self._open(circuit, f"the probe failed: {reason}", now_s)
        elif circuit.in_a_row >= self._failures_max * (4 if is_refusal else 1):
            self._open(circuit, f"{circuit.in_a_row} failures in a row, the last one: {reason}", now_s)
        elif len(circuit.recent) == WINDOW_EVENTS and not is_refusal:
            failures = circuit.recent.count(False)
            if failures >= WINDOW_SHARE * WINDOW_EVENTS:
                self._open(
                    circuit, f"{failures} of {WINDOW_EVENTS} attempts failed, the last one: {reason}", now_s
                )

    def worked(self, worker_id: WorkerId, seq_id: SequenceId, *, now_s: float) -> None:
        """Note that the worker did its phase: it produced the first token, or the sequence joined its
        batch."""
        circuit = self._circuits.get(replica_of(worker_id))
        if circuit is None:
            return
        if not circuit.is_open:
            circuit.in_a_row = 0
            circuit.recent.append(True)
        elif circuit.probe == seq_id:
            self._close(circuit, now_s)

    def reported(
        self, worker_id: WorkerId, slow: float | None, peers: Iterable[WorkerId], *, now_s: float
    ) -> None:
        """Note the slowness that follows from a load report. `peers` are the workers of the same role."""
        if not self._failures_max or not self._slow_factor or slow is None:
            return
        circuit = self._circuit(worker_id)
        circuit.slowness = slow
        self._least_slowness = min(self._least_slowness, slow)
        if slow <= self._slow_factor * self._least_slowness:  # no larger than the peers' median either
            circuit.slow_reports = 0
            return
        others = [c.slowness for c in map(self._known, peers) if c and c is not circuit and c.slowness]
        if circuit.is_open or not others or slow <= self._slow_factor * median(others):
            self._least_slowness = min(c.slowness for c in self._circuits.values() if c.slowness is not None)
            circuit.slow_reports = 0
            return
        circuit.slow_reports += 1
        if circuit.slow_reports >= SLOW_REPORTS:
            self._open(circuit, f"its steps take {slow:.1f} times as long as at its start", now_s)

    def placed(self, worker_id: WorkerId, seq_id: SequenceId, *, now_s: float) -> None:
        circuit = self._known(worker_id)
        if circuit is not None and circuit.state(now_s) is BreakerState.HALF_OPEN and circuit.probe is None:
            circuit.probe = seq_id
            self._probes.setdefault(seq_id, set()).add(circuit.name)

    def left(self, seq_id: SequenceId, holders: Collection[WorkerId]) -> None:
        """Note that the sequence is at `holders` only, and is no probe elsewhere any more."""
        names = self._probes.get(seq_id)
        if names is None:
            return
        for name in names - {replica_of(w) for w in holders}:
            self._circuits[name].probe = None
            names.discard(name)
        if not names:
            del self._probes[seq_id]

    # --- what follows -----------------------------------------------------------------------------

    def suspended(self, roles: Mapping[WorkerId, Role], *, now_s: float) -> frozenset[WorkerId]:
        """Return the workers that get no new sequence now: at most the configured part of each pool, never
        all of it. Those whose breaker opened first stay out."""
        shut = [w for w in roles if (c := self._known(w)) is not None and c.is_shut(now_s)]
        if not shut:
            return frozenset()
        shut.sort(key=lambda w: (self._circuits[replica_of(w)].opened_s, w))
        left = {
            which: _may_be_out(sum(map(which, roles.values())), self._share_max)
            for which in (_prefills, _decodes)
        }
        out: list[WorkerId] = []
        for worker_id in shut:
            pools = [which for which in left if which(roles[worker_id])]
            if all(left[which] > 0 for which in pools):
                out.append(worker_id)
                for which in pools:
                    left[which] -= 1
        return frozenset(out)

    def state(self, worker_id: WorkerId, *, now_s: float) -> BreakerStatus:
        circuit = self._known(worker_id)
        if circuit is None:
            return BreakerStatus(BreakerState.CLOSED, "")
        return BreakerStatus(circuit.state(now_s), circuit.reason)

    @property
    def any_open(self) -> bool:
        """Whether some breaker is open or half open."""
        return bool(self._open_names)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is a probe."""
        return not self._probes

    def check(self) -> None:
        probes = {(c.probe, c.name) for c in self._circuits.values() if c.probe is not None}
        assert probes == {(s, name) for s, names in self._probes.items() for name in names}
        assert len(self._circuits) <= CIRCUITS_MAX
        assert self._open_names == {c.name for c in self._circuits.values() if c.is_open}
        assert all(c.slowness is None or c.slowness >= self._least_slowness for c in self._circuits.values())
        for circuit in self._circuits.values():
            assert circuit.is_open or circuit.probe is None
            assert circuit.open_s <= self._open_max_s

    # --- parts ------------------------------------------------------------------------------------

    def _known(self, worker_id: WorkerId) -> Circuit | None:
        return self._circuits.get(replica_of(worker_id))

    def _circuit(self, worker_id: WorkerId) -> Circuit:
        name = replica_of(worker_id)
        if name not in self._circuits:
            if len(self._circuits) >= CIRCUITS_MAX:
                self._forget_oldest()
            self._circuits[name] = Circuit(name)
        return self._circuits[name]

    def _forget_oldest(self) -> None:
        name = next(iter(self._circuits))
        circuit = self._circuits.pop(name)
        self._open_names.discard(name)
        if circuit.probe is not None:
            self._probes[circuit.probe].discard(name)
            if not self._probes[circuit.probe]:
                del self._probes[circuit.probe]

    def _open(self, circuit: Circuit, reason: str, now_s: float) -> None:
        is_relapse = circuit.is_open or now_s - circuit.closed_s < FORGIVEN_AFTER * circuit.open_s
        longer_s = 2 * circuit.open_s if is_relapse else self._open_s
        circuit.open_s = min(self._open_max_s, max(self._open_s, longer_s))
        circuit.is_open, circuit.opened_s, circuit.reason = True, now_s, reason
        self._open_names.add(circuit.name)
        self.opened_count += 1
        circuit.in_a_row = circuit.slow_reports = 0
        circuit.recent.clear()
        self._drop_probe(circuit)

    def _close(self, circuit: Circuit, now_s: float) -> None:
        circuit.is_open, circuit.closed_s = False, now_s
        self._open_names.discard(circuit.name)
        circuit.in_a_row = circuit.slow_reports = 0
        circuit.recent.clear()
        self._drop_probe(circuit)

    def _drop_probe(self, circuit: Circuit) -> None:
        if circuit.probe is not None:
            names = self._probes[circuit.probe]
            names.discard(circuit.name)
            if not names:
                del self._probes[circuit.probe]
            circuit.probe = None


def _prefills(role: Role) -> bool:
    return role.prefills


def _decodes(role: Role) -> bool:
    return role.decodes


def _may_be_out(count: int, share_max: float) -> int:
    return max(0, min(count - 1, int(share_max * count)))
