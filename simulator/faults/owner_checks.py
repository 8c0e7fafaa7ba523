"""What a KV owner owes to its readers: an answer to every request, within one lease."""

from baton.core.ids import SeqKey, WorkerId
from baton.core.messages import KVReleased, KVRequest, OwnerMessage, ReaderMessage
from simulator.faults.observed_processes import ObservedWorker
from simulator.faults.run_context import RunContext, Violation

SLACK_S = 0.01


class OwnerChecks:
    """The requests for KV that have no answer yet, of all owners of a run."""

    __slots__ = ("_lease_s", "_run", "_unanswered")

    def __init__(self, run: RunContext, *, lease_s: float) -> None:
        self._run, self._lease_s = run, lease_s
        self._unanswered: dict[tuple[WorkerId, WorkerId, SeqKey], float] = {}
        """Requests by owner, reader and attempt: the end of the lease on the owner's clock."""

    def heard(self, owner: ObservedWorker, reader: WorkerId, message: ReaderMessage) -> None:
        """Take note of a message of a reader, before the owner handles it."""
        about = (owner.worker_id, reader, SeqKey(message.seq_id, message.epoch))
        match message:
            case KVReleased():
                self._unanswered.pop(about, None)
            case KVRequest() if about not in self._unanswered:
                self._unanswered[about] = owner.local_clock.now_s() + self._lease_s
                self._look_later(owner, about)
            case _:
                pass

    def said(self, owner: ObservedWorker, reader: WorkerId, message: OwnerMessage) -> None:
        """Take note of a grant or a refusal."""
        self._unanswered.pop((owner.worker_id, reader, SeqKey(message.seq_id, message.epoch)), None)

    def _look_later(self, owner: ObservedWorker, about: tuple[WorkerId, WorkerId, SeqKey]) -> None:
        end_s = self._unanswered[about]

        def look() -> None:
            if self._unanswered.get(about) != end_s:
                return
            late_s = owner.local_clock.now_s() - end_s
            if late_s > SLACK_S:
                _, reader, key = about
                raise Violation(
                    6, f"{owner.name} leaves {reader}'s request for {key} unanswered", seq_id=key.seq_id
                )
            self._look_later(owner, about)  # its clock stood still meanwhile

        at_s = owner.local_clock.virtual_s(end_s) + 2 * SLACK_S
        self._run.clock.at(at_s, lambda: owner.post(look))
