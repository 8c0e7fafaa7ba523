"""Blocks of a sequence that come from outside the pool instead of being computed."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Incoming:
    """Who brings the blocks makes it, moves `ready` and `end`, and asks the scheduler to look again; the
    scheduler moves `first`. A sequence that loses its blocks loses this too: its identity says whether what
    is being brought is still wanted.

        computed here │ first … ready: in place │ ready … end: on their way │ computed here, after them
    """

    wait_until_s: float = 0.0
    """The sequence is not admitted before: somebody is being asked what can be brought."""
    first: int = 0
    """Position, in blocks, where computing stops until the next ones are there."""
    ready: int = 0
    end: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether computing may not go past `first` yet."""
        return self.first < self.end
