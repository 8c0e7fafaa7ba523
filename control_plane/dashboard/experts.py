"""The distribution of tokens over the experts of a mixture: its short history, and the figures shown. Pure.

Counts by worker and expert are many, and nobody asks for those of hours ago. They are kept apart from other
metrics, for minutes.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from baton.core.ids import replica_name
from baton.core.operate import ClusterState
from baton.telemetry import catalogue as c
from control_plane.dashboard.derive import level
from control_plane.dashboard.samples import MetricsFrame, Table, risen

STEP_S, STEP_COUNT = 10.0, 30
"""The history covers the last five minutes in steps."""

EXPERTS_MAX = 4096
"""Most experts of a model; a report of more is not from a worker of ours."""

Tokens = tuple[float, ...]
"""Tokens by expert."""


class ExpertHistory:
    """The token counts of every worker whose model has experts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, dict[str, list[float]]]] = deque()
        self._sums: dict[str, list[float]] = {}
        """Sums over all steps, by worker."""

    def add(self, at_s: float, looks: Iterable[tuple[Table | None, Table]]) -> None:
        """Add one round of scrapes, in the form that `frame_of` gets."""
        index = int(at_s // STEP_S)
        if not self._steps or self._steps[-1][0] < index:
            self._steps.append((index, {}))
        while self._steps[0][0] <= index - STEP_COUNT:
            self._forget(self._steps.popleft()[1])
        step = self._steps[-1][1]
        for before, now in looks:
            values = now.get(c.EXPERT_TOKENS.name, {})
            known = None if before is None else before.get(c.EXPERT_TOKENS.name, {})
            for labels, value in values.items():
                found = dict(labels)
                expert = int(found["expert"]) if found.get("expert", "").isdecimal() else EXPERTS_MAX
                if expert < EXPERTS_MAX:
                    rise = 0.0 if known is None else risen(known.get(labels, 0.0), value)
                    for into in (step, self._sums):
                        _add(into.setdefault(found.get("worker", ""), []), expert, rise)

    def tokens(self) -> dict[str, Tokens]:
        """Return the tokens by worker; zeros for one that computed nothing lately."""
        return {worker: tuple(counts) for worker, counts in self._sums.items()}

    def _forget(self, step: dict[str, list[float]]) -> None:
        for worker, counts in step.items():
            if not any(worker in later for _, later in self._steps):
                del self._sums[worker]
                continue
            for expert, count in enumerate(counts):
                self._sums[worker][expert] -= count


def _add(into: list[float], expert: int, count: float) -> None:
    into.extend([0.0] * (expert + 1 - len(into)))
    into[expert] += count


class ExpertRow(msgspec.Struct, frozen=True):
    """The load of the experts of one worker, or of all workers."""

    name: str
    tokens: Tokens
    balance: float | None
    """Mean over layers, see `baton_moe_expert_balance_ratio`. None: too few tokens lately."""
    worst: float | None
    """Balance of the least balanced layer."""

    @property
    def shares(self) -> Tokens:
        """Load of each expert in multiples of an even share. Empty: no token."""
        even = sum(self.tokens) / max(1, len(self.tokens))
        return tuple(count / even for count in self.tokens) if even else ()

    @property
    def busiest(self) -> list[tuple[int, float]]:
        """(expert, multiple of an even share), the busiest first."""
        return sorted(enumerate(self.shares), key=lambda one: (-one[1], one[0]))


class ExpertGroup(msgspec.Struct, frozen=True):
    """The workers of one model."""

    model: str
    total: ExpertRow
    workers: list[ExpertRow]
    """Workers, the least balanced first."""

    @property
    def expert_count(self) -> int:
        return len(self.total.tokens)


def expert_groups(
    state: ClusterState | None, tokens: Mapping[str, Tokens], now: MetricsFrame | None
) -> list[ExpertGroup]:
    """Return a group for each model whose experts are counted. `tokens` is `ExpertHistory.tokens`, `now` the
    latest frame."""
    rows: dict[str, list[ExpertRow]] = {}
    for replica in state.replicas if state is not None else ():
        name = replica_name(replica.worker_id) if replica.worker_id else ""
        if name in tokens:
            balance, worst = (_balance(now, name, layers) for layers in ("mean", "worst"))
            rows.setdefault(replica.model, []).append(ExpertRow(name, tokens[name], balance, worst))
    return [_group(model, found) for model, found in sorted(rows.items())]


def _balance(now: MetricsFrame | None, worker: str, layers: str) -> float | None:
    """Return the balance of one worker. None: this worker has none, even if another has."""
    if now is None or (("layers", layers), ("worker", worker)) not in now.levels.get(
        c.EXPERT_BALANCE.name, {}
    ):
        return None
    return level(now, c.EXPERT_BALANCE.name, worker=worker, layers=layers)


def _group(model: str, rows: list[ExpertRow]) -> ExpertGroup:
    sums: list[float] = []
    for row in rows:
        for expert, count in enumerate(row.tokens):
            _add(sums, expert, count)
    known = [(row.balance, sum(row.tokens)) for row in rows if row.balance is not None]
    weight = sum(count for _, count in known)
    balance = sum(value * count for value, count in known) / weight if weight else None
    worst = min((row.worst for row in rows if row.worst is not None), default=None)
    ordered = sorted(rows, key=lambda row: (2.0 if row.balance is None else row.balance, row.name))
    return ExpertGroup(model, ExpertRow("all workers", tuple(sums), balance, worst), ordered)
