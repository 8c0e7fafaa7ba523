"""Decides from the first answers whether a run is worth continuing: a server without the requested class
refuses them all. Pure."""

from dataclasses import dataclass

from loadgen.records import ErrorKind, RequestOutcome, RequestRecord

ALIKE = 5
"""Number of first answers that must carry the same complaint. A single one may concern one prompt that is too
long."""


@dataclass(slots=True)
class FirstAnswers:
    _said: str = ""
    _count: int = 0
    _is_over: bool = False
    """True once a request was answered otherwise. Any later complaint is part of the run."""

    @property
    def complaint(self) -> str:
        """The server's answer to each of the first requests, status first; empty if the run may continue."""
        return self._said if self._count >= ALIKE else ""

    def ended(self, record: RequestRecord) -> None:
        if self._is_over or self._count >= ALIKE:
            return
        is_wrong = record.outcome is RequestOutcome.FAILED and record.error is ErrorKind.HTTP
        if not is_wrong or not record.detail.startswith("4") or self._said not in ("", record.detail):
            self._is_over, self._count = True, 0
            return
        self._said = record.detail
        self._count += 1
