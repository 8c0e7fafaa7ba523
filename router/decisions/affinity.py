"""Where sequences of a group run, and where adapters are loaded: places that a sequence may prefer."""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from router.decisions.events import Submit

ADAPTERS_MAX = 256
"""Adapters remembered; the one used longest ago is forgotten first."""
NOWHERE: frozenset[WorkerId] = frozenset()


class Affinity:
    """Siblings share the blocks of their prompt while it is in flight, so they go together while there is
    room. A worker that used an adapter has it, as long as it is not much busier than the others."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, frozenset[WorkerId]]] = {}
        """Group -> (live sequences of it that were placed, where the last one was)."""
        self._adapters: dict[str, frozenset[WorkerId]] = {}
        """Digest -> where it was used, most recently used last."""

    def placed(self, submit: Submit, worker_ids: Iterable[WorkerId], *, is_first_time: bool) -> None:
        places = frozenset(worker_ids)
        if submit.group:
            count, _ = self._groups.get(submit.group, (0, places))
            self._groups[submit.group] = (count + is_first_time, places)
        if submit.adapter is not None:
            used = self._adapters.pop(submit.adapter.digest, NOWHERE)
            self._adapters[submit.adapter.digest] = used | places
            if len(self._adapters) > ADAPTERS_MAX:
                del self._adapters[next(iter(self._adapters))]

    def over(self, submit: Submit) -> None:
        """A sequence that was placed has ended."""
        if submit.group:
            count, places = self._groups.pop(submit.group)
            if count > 1:
                self._groups[submit.group] = (count - 1, places)

    def lost(self, worker_id: WorkerId) -> None:
        """The worker is gone, and what it had loaded."""
        self._adapters = {digest: at - {worker_id} for digest, at in self._adapters.items()}

    def siblings_at(self, submit: Submit) -> frozenset[WorkerId]:
        """Where the newest of its group runs; empty: it has no group, or is the first."""
        return self._groups[submit.group][1] if submit.group in self._groups else NOWHERE

    def adapter_at(self, submit: Submit) -> frozenset[WorkerId] | None:
        """Where its adapter was used; None: it needs none."""
        return None if submit.adapter is None else self._adapters.get(submit.adapter.digest, NOWHERE)

    @property
    def is_idle(self) -> bool:
        return not self._groups
