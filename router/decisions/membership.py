"""The workers to talk to. Pure: the directory's views in, addresses and events out.

What the directory said last holds until it says otherwise, and a worker that it no longer lists is
merely not dialled again: a session that is open says more about its worker than a directory that has
just restarted and knows nobody yet.
"""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from baton.core.messages import MembershipView, Role
from router.decisions.events import WorkerUpdated


class FollowedMembership:
    def __init__(self, static_addresses: Iterable[str] = ()) -> None:
        """`static_addresses`: workers given by hand, wanted whatever the directory says."""
        self._static = frozenset(static_addresses)
        self._listed: frozenset[str] = frozenset()
        self._states: dict[WorkerId, tuple[Role, bool, bool]] = {}
        self._newest: tuple[str, int] | None = None

    @property
    def addresses(self) -> frozenset[str]:
        return self._static | self._listed

    def on_view(self, view: MembershipView) -> list[WorkerUpdated]:
        """What changed for workers listed before. A view older than the newest changes nothing."""
        life, version = self._newest or ("", 0)
        if view.directory_life == life and view.version < version:
            return []
        self._newest = (view.directory_life, view.version)
        self._listed = frozenset(member.address for member in view.members)
        states = {m.worker_id: (m.role, m.is_draining, m.is_suspect) for m in view.members}
        updates = [
            WorkerUpdated(worker_id, *state)
            for worker_id, state in states.items()
            if self._states.get(worker_id, state) != state
        ]
        self._states = states
        return updates
