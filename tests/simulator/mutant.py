"""One production decision, broken on purpose."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A broken decision and the promises that it breaks."""

    name: str
    apply: Callable[[Patch], None]
    invariants: AbstractSet[int]
    """Invariants that may be the first to be seen broken."""
