"""A lifecycle: a table of legal transitions, and the history of how an object got where it is."""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

HISTORY_ENTRIES_MAX = 64


class IllegalTransition(Exception):
    """A bug in our code, never a client error. It carries the history, so that the log line is enough."""


P = TypeVar("P", bound=StrEnum)


class Lifecycle(Generic[P]):
    """The current state of one object and the last transitions that led there."""

    __slots__ = ("_legal", "history", "state")

    def __init__(self, start: P, legal: Mapping[P, frozenset[P]], *, now_s: float) -> None:
        self._legal = legal
        self.state: P = start
        self.history: deque[tuple[float, P, str]] = deque([(now_s, start, "created")], HISTORY_ENTRIES_MAX)

    def to(self, state: P, *, now_s: float, cause: str) -> None:
        """Change the state. Raises IllegalTransition if the table does not allow it."""
        if state not in self._legal[self.state]:
            raise IllegalTransition(f"{self.state} -> {state} ({cause}); history={list(self.history)}")
        self.state = state
        self.history.append((now_s, state, cause))

    @property
    def is_terminal(self) -> bool:
        return not self._legal[self.state]
