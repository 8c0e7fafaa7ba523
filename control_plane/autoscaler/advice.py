"""The filter that keeps repeated advice out of the log. Pure."""

from collections.abc import Mapping

from baton.core.messages import Role


class AdviceFilter:
    """The advice given last. Nobody follows advice, so each decision starts from the replicas that run, and
    logging all of it would follow every change of the load. Advice to grow counts as news at once; advice to
    shrink counts once it has held for the patience."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._counts: Mapping[Role, int] = {}
        self._have: Mapping[Role, int] = {}
        self._less_since_s: float | None = None

    def is_news(self, counts: Mapping[Role, int], have: Mapping[Role, int], now_s: float) -> bool:
        """Return whether this advice should be logged. `have` is the size that the cluster is ordered to have
        now; advice to keep it is never news."""
        if have != self._have:
            self._counts, self._have, self._less_since_s = have, dict(have), None
        if any(count > self._counts.get(role, 0) for role, count in counts.items()):
            self._counts = {role: max(count, self._counts.get(role, 0)) for role, count in counts.items()}
            self._less_since_s = None
            return True
        if all(count == self._counts.get(role, 0) for role, count in counts.items()):
            self._less_since_s = None
            return False
        if self._less_since_s is None:
            self._less_since_s = now_s
        if now_s - self._less_since_s < self._patience_s:
            return False
        self._counts, self._less_since_s = dict(counts), None
        return counts != have
