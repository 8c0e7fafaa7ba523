"""Rows that a worker's leading rank sends to expert ranks: as accounts, and what waiting for them means."""

from typing import Protocol

import msgspec

from baton.core.steps import StepResult
from engine.experts.caller import CallerStats


class RowSender(Protocol):
    """A connection to expert ranks, see `engine.experts.following.ExpertConnection`."""

    suspected_count: int

    @property
    def is_parked(self) -> bool: ...

    def missing_s(self) -> float:
        """Return the time since the start for which rows waited for experts that no rank held."""
        ...

    def stalled_s(self) -> float:
        """Return the time since the start in which rows waited, or some expert could not be reached."""
        ...

    @property
    def epoch(self) -> int: ...

    def stats(self) -> CallerStats | None:
        """Return the totals since the start. None: nothing is connected yet."""
        ...


class ExpertRows:
    def __init__(self, sender: RowSender) -> None:
        self._sender, self._waited_s = sender, 0.0
        self._missing_s = sender.missing_s()

    def timed(self, result: StepResult) -> StepResult:
        """Take the time since the last call for which rows waited for experts that no rank held off a step's
        time: it says nothing of what steps cost."""
        before_s, self._missing_s = self._missing_s, self._sender.missing_s()
        missing_s = self._missing_s - before_s
        if missing_s <= 0:
            return result
        return msgspec.structs.replace(result, elapsed_s=max(0.0, result.elapsed_s - missing_s))

    def stalled_s(self) -> float:
        """Return the time since the start in which any of the worker's processes may have had to wait
        for experts."""
        return self._sender.stalled_s()

    def notes(self) -> tuple[str, ...]:
        """Return what operators should know now, as notes of the worker."""
        if not self._sender.is_parked:
            return ()
        return (
            "parked: no expert rank has the experts that its rows need; its sequences go on when ranks are "
            "back (see `baton experts show`)",
        )

    def waited_s(self) -> float:
        """Return the time that the computing thread waited since the last call."""
        stats = self._sender.stats()
        total_s = stats.waited_s if stats is not None else 0.0
        new_s, self._waited_s = max(0.0, total_s - self._waited_s), total_s
        return new_s

    def accounts(self) -> dict[str, float]:
        """Return totals since the start, under the names that `worker.metrics.EXPERT_COUNTERS` has."""
        stats = self._sender.stats()
        if stats is None:
            return {}
        return {
            "experts.dispatched_rows": float(stats.rows),
            "experts.dispatched_pairs": float(stats.pairs),
            "experts.dispatched_bytes": float(stats.row_bytes),
            "experts.combined_bytes": float(stats.result_bytes),
            "experts.rerouted_pairs": float(stats.rerouted),
            "experts.suspected_ranks": float(self._sender.suspected_count),
            "experts.waited_s": stats.waited_s,
            "experts.missing_s": self._sender.missing_s(),
            "experts.map_epoch": float(self._sender.epoch),
        }
