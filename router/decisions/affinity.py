"""Where a sequence would rather run: beside its siblings, or where its adapter is loaded already."""

from collections.abc import Collection, Iterable

from baton.core.ids import WorkerId
from router.decisions.events import Submit
from router.decisions.placement.views import SEQUENCE_TOKENS, WorkerView

ADAPTERS_MAX = 256
"""Adapters remembered; the one used longest ago is forgotten first."""

EXTRA_LOAD_TOKENS = 4 * SEQUENCE_TOKENS
"""How much more load than the least a worker may have and still be preferred for its adapter: loading one
elsewhere costs about as much as a few sequences."""


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
            used = self._adapters.pop(submit.adapter.digest, frozenset())
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
        """What it had loaded is gone."""
        self._adapters = {digest: at - {worker_id} for digest, at in self._adapters.items()}

    def mark(self, submit: Submit, views: list[WorkerView]) -> list[WorkerView]:
        """The views, with `is_preferred` set where it applies."""
        if submit.group in self._groups:
            return _prefer(views, self._groups[submit.group][1])
        used = self._adapters.get(submit.adapter.digest) if submit.adapter is not None else None
        if not used or not views:
            return views
        load_max = min(v.load for v in views) + EXTRA_LOAD_TOKENS
        return _prefer(views, {v.worker_id for v in views if v.worker_id in used and v.load <= load_max})

    def loaded(self, digest: str) -> frozenset[WorkerId] | None:
        """Where the adapter was used; None: nowhere that is known."""
        return self._adapters.get(digest)

    @property
    def is_idle(self) -> bool:
        return not self._groups


def _prefer(views: list[WorkerView], worker_ids: Collection[WorkerId]) -> list[WorkerView]:
    return [v._replace(is_preferred=True) if v.worker_id in worker_ids else v for v in views]
