"""Blocks of a sequence that come from outside the pool instead of being computed."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Incoming:
    """Blocks that are on their way to a sequence. The loader of the blocks makes this object, moves `ready`
    and `end`, and asks the scheduler to look again; the scheduler moves `first`. A sequence that loses its
    blocks loses this object too, so the object's identity says whether the content is still wanted.

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
        """True if computing may not go past `first` yet."""
        return self.first < self.end
