"""The workers that a sequence prefers: those of its group, and those that have its adapter loaded."""

from collections.abc import Iterable

from baton.core.ids import WorkerId
from router.decisions.events import Submit

ADAPTERS_MAX = 256
"""Adapters remembered; the one used longest ago is forgotten first."""
NOWHERE: frozenset[WorkerId] = frozenset()


class Affinity:
    """Sequences of a group share the blocks of their prompt, so they are placed together while there is room.
    A worker that used an adapter is preferred for it while it is not much busier than others."""

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
        """Note that a placed sequence has ended."""
        if submit.group:
            count, places = self._groups.pop(submit.group)
            if count > 1:
                self._groups[submit.group] = (count - 1, places)

    def lost(self, worker_id: WorkerId) -> None:
        """Forget the adapters of a worker that is gone."""
        self._adapters = {digest: at - {worker_id} for digest, at in self._adapters.items()}

    def siblings_at(self, submit: Submit) -> frozenset[WorkerId]:
        """Return where the newest sequence of its group runs; empty if there is none."""
        return self._groups[submit.group][1] if submit.group in self._groups else NOWHERE

    def adapter_at(self, submit: Submit) -> frozenset[WorkerId] | None:
        """Return the workers where its adapter was used; None if it needs none."""
        return None if submit.adapter is None else self._adapters.get(submit.adapter.digest, NOWHERE)

    @property
    def is_idle(self) -> bool:
        return not self._groups
