"""Is there any use in going on? A class that the server does not have is told by its first answers. Pure."""

from dataclasses import dataclass

from loadgen.records import ErrorKind, Outcome, Record

ALIKE = 5
"""So many first answers with one and the same complaint; a single one may be of a prompt that is too long."""


@dataclass(slots=True)
class FirstAnswers:
    _said: str = ""
    _count: int = 0
    _is_over: bool = False
    """Some request was answered in another way: whatever comes later is part of the run."""

    @property
    def complaint(self) -> str:
        """What the server said to each of the first requests, status first; empty: go on."""
        return self._said if self._count >= ALIKE else ""

    def ended(self, record: Record) -> None:
        if self._is_over or self._count >= ALIKE:
            return
        is_wrong = record.outcome is Outcome.FAILED and record.error is ErrorKind.HTTP
        if not is_wrong or not record.detail.startswith("4") or self._said not in ("", record.detail):
            self._is_over, self._count = True, 0
            return
        self._said = record.detail
        self._count += 1
