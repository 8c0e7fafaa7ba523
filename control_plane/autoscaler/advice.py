"""Which advice is worth saying. Pure."""

from collections.abc import Mapping

from baton.core.messages import Role


class AdviceFilter:
    """What was advised last. Nobody follows it, so each decision begins from what runs: told each time, it
    would go to and fro with the load. More is news at once, less when it has been less for the patience."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._counts: Mapping[Role, int] = {}
        self._have: Mapping[Role, int] = {}
        self._less_since_s: float | None = None

    def is_news(self, counts: Mapping[Role, int], have: Mapping[Role, int], now_s: float) -> bool:
        """`have`: what is wanted of the cluster now; to keep it is no news, whatever was said before."""
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
