"""One deadline is made at the front door and passed down; it crosses the wire as seconds left."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant on this process's monotonic clock."""

    at_s: float

    @classmethod
    def after(cls, seconds: float, *, now_s: float) -> "Deadline":
        return cls(now_s + seconds)

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.at_s - now_s)

    def over(self, now_s: float) -> bool:
        return now_s >= self.at_s
