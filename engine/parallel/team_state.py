"""What the leader of a worker knows of its followers, and when that is the end of the worker.

Pure: `engine.execution.team` has the threads and the processes around it, and the fault simulator decides by
the same object.
"""

from typing import NamedTuple

from engine.parallel.orders import AdapterRead, FollowerFailed, FollowerReady, FollowerReport


class AdapterFailed(NamedTuple):
    """A follower that has not read its part of an adapter."""

    rank: int
    reason: str


class TeamState:
    """The followers of one worker, from their start to the end of all."""

    def __init__(self, rank_count: int) -> None:
        self._followers = tuple(range(1, rank_count))
        self.ready: dict[int, FollowerReady] = {}
        self.end_reason = ""
        """Why the ranks end; empty while they work."""
        self.is_setup = False
        """They end for a reason that somebody must change first."""
        self.is_closing = False
        """The leader ends the worker, so that nobody is lost any more."""
        self._adapter_key = ""
        self._adapter_reads: dict[int, AdapterRead] = {}
        """Reports on the adapter that is being read, by rank."""

    @property
    def is_ready(self) -> bool:
        """Whether every follower can execute plans."""
        return not self.late

    @property
    def late(self) -> tuple[int, ...]:
        """Followers that cannot execute plans yet."""
        return tuple(rank for rank in self._followers if rank not in self.ready)

    def reported(self, rank: int, report: FollowerReport) -> str:
        """Take a follower's report. Return the reason if the ranks must end for it, else nothing."""
        match report:
            case FollowerReady():
                self.ready[rank] = report
            case AdapterRead():
                if report.key == self._adapter_key:  # one that took too long may still arrive
                    self._adapter_reads[rank] = report
            case FollowerFailed():
                self.is_setup = self.is_setup or (report.is_setup and not self.end_reason)
                return f"rank {rank}: {report.reason}"
        return ""

    def ended(self, reason: str) -> bool:
        """Note that a rank is lost or fails. Return whether that is news, of which everybody must be told."""
        if self.is_closing or self.end_reason:
            return False
        self.end_reason = reason
        return True

    # --- one adapter at a time ----------------------------------------------------------------------

    def adapter_begins(self, key: str) -> None:
        self._adapter_reads.clear()
        self._adapter_key = key

    @property
    def is_adapter_read(self) -> bool:
        """Whether every follower has said how it went."""
        return len(self._adapter_reads) == len(self._followers)

    def adapter_failed(self, patience_s: float) -> AdapterFailed | None:
        """Return the first follower that could not read its part, or has not in `patience_s`."""
        for rank in self._followers:
            read = self._adapter_reads.get(rank)
            if read is None:  # slow storage is no reason to end a worker that serves others
                return AdapterFailed(rank, f"it takes longer than {patience_s:g} s")
            if read.error:
                return AdapterFailed(rank, read.error)
        return None
