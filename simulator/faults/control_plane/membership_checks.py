"""Members of the directory, against those that were heard."""

from baton.core.ids import WorkerId
from baton.core.messages import Member
from control_plane import membership as mb
from simulator.faults.control_plane.life import ControlLife
from simulator.faults.control_plane.scenario import ControlScenario
from simulator.faults.run_context import RunContext, Violation

INVARIANT = 13
SLACK_S = 0.05


class MembershipChecker:
    """A second account of the leases of one life of the directory."""

    __slots__ = (
        "_before_s",
        "_due_s",
        "_ends_s",
        "_heard_s",
        "_left",
        "_paused_until_s",
        "_run",
        "_scenario",
    )

    def __init__(self, run: RunContext, scenario: ControlScenario) -> None:
        self._run, self._scenario = run, scenario
        self._ends_s: dict[WorkerId, float] = {}
        self._due_s: dict[WorkerId, float] = {}
        """The same, kept when a lease is over."""
        self._heard_s: dict[WorkerId, float] = {}
        self._before_s: dict[WorkerId, float] = {}
        """When each was heard the time before."""
        self._left: set[WorkerId] = set()
        self._paused_until_s = 0.0

    def life_begins(self) -> None:
        for known in (self._ends_s, self._due_s, self._heard_s, self._before_s, self._left):
            known.clear()
        self._paused_until_s = 0.0

    def was_heard(self, worker_id: WorkerId) -> bool:
        return worker_id in self._heard_s

    def lapsed_for_s(self, worker_id: WorkerId) -> float:
        """Return how long ago the lease of a worker that was heard in this life ended; 0 for another one."""
        now_s = self._run.clock.now_s
        return max(0.0, now_s - self._due_s.get(worker_id, now_s))

    def renewed(self, member: Member) -> None:
        if member.worker_id in self._left:
            self._run.counts["renewals after the end"] += 1
            return
        now_s = self._run.clock.now_s
        self._before_s[member.worker_id] = self._heard_s.get(member.worker_id, now_s)
        self._heard_s[member.worker_id] = now_s
        self._ends_s[member.worker_id] = self._due_s[member.worker_id] = now_s + self._scenario.member_lease_s

    def changed(self, life: ControlLife, event: mb.MembershipEvent) -> None:
        match event:
            case mb.WorkerLeft(worker_id):
                self._left.add(worker_id)
                end_s = self._ends_s.pop(worker_id, float("inf"))
                self._run.counts["members lapsed"] += end_s <= self._run.clock.now_s
            case mb.DirectoryPaused(for_s):
                self._run.counts["pauses of the directory"] += 1
                self._paused_until_s = self._run.clock.now_s
                self._ends_s = {w: end_s + for_s for w, end_s in self._ends_s.items()}
                self._due_s = {w: end_s + for_s for w, end_s in self._due_s.items()}
            case _:
                return
        self.look(life)

    def look(self, life: ControlLife) -> None:
        if life.was_stalled_lately:
            return  # it has not done yet what was due
        now_s = self._run.clock.now_s
        members = {member.worker_id: member for member in life.book.view.members}
        for worker_id, member in members.items():
            if worker_id in self._left:
                raise Violation(INVARIANT, f"{worker_id} left, and is listed")
            end_s = self._ends_s.get(worker_id)
            if end_s is None or end_s < now_s - SLACK_S:
                raise Violation(
                    INVARIANT, f"{worker_id} is listed, and its lease ended at {end_s}; it is {now_s:.2f}"
                )
            self._look_at_suspicion(member, now_s)
        for worker_id, end_s in list(self._ends_s.items()):
            if end_s < now_s - SLACK_S:
                del self._ends_s[worker_id]
            elif end_s > now_s + SLACK_S and worker_id not in members:
                raise Violation(INVARIANT, f"{worker_id} renews its lease, and is not listed")

    def _look_at_suspicion(self, member: Member, now_s: float) -> None:
        """Check that exactly those are suspect who missed heartbeats while others were heard."""
        suspect_s = self._scenario.member_suspect_s
        heard_s = self._heard_s[member.worker_id]
        if now_s - self._paused_until_s < 2 * suspect_s:
            return
        if member.is_suspect:
            self._run.counts["members suspect"] += 1
            if now_s - heard_s < suspect_s - SLACK_S:
                raise Violation(
                    INVARIANT, f"{member.worker_id} was heard {now_s - heard_s:.2f} s ago, and is suspect"
                )
        elif now_s - heard_s > suspect_s + SLACK_S:
            due_s = heard_s + suspect_s
            others = [s for w, s in self._before_s.items() if w != member.worker_id and w in self._ends_s]
            if any(heard_s + SLACK_S < other_s < due_s for other_s in others):
                silent_s = now_s - heard_s
                raise Violation(
                    INVARIANT,
                    f"{member.worker_id} was heard {silent_s:.2f} s ago, others since, and it is not suspect",
                )
