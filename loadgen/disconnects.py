"""Users who do not wait for the whole answer. Pure, seeded: which request is hung up on, and when."""

import random
from dataclasses import dataclass

from baton.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class HangUp:
    """The client closes the connection at whichever comes first."""

    after_tokens: int | None = None
    after_s: float | None = None
    """Since the planned instant, answered or not."""


@dataclass(frozen=True, slots=True)
class HangUps:
    """A share of all requests, drawn by their row in the trace: the same ones in every run of a seed.

    With `mean_s` the user's patience is exponential with that mean; without, it ends after a number of
    answer tokens that is uniform over the answer's length. A request that ends before is none.
    """

    share: float = 0.0
    mean_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SetupError(f"--cancel {self.share:g}: must be a share from 0 to 1")
        if self.mean_s is not None and self.mean_s <= 0:
            raise SetupError(f"--cancel-after {self.mean_s:g}: must be above 0")

    def of(self, row: int, output_tokens: int) -> HangUp | None:
        """None: this request is waited for."""
        if not self.share:
            return None
        rng = random.Random(f"hang up {self.seed} {row}")
        if rng.random() >= self.share:
            return None
        if self.mean_s is not None:
            return HangUp(after_s=rng.expovariate(1 / self.mean_s))
        return HangUp(after_tokens=rng.randint(1, max(1, output_tokens - 1)))
