"""Users who disconnect before the whole answer has come. Pure and seeded: it decides which requests are cut
off, and when."""

import random
from dataclasses import dataclass

from baton.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client closes the connection at whichever limit comes first."""

    after_tokens: int | None = None
    after_s: float | None = None
    """Seconds since the planned instant, whether or not an answer has come."""


@dataclass(frozen=True, slots=True)
class Disconnects:
    """A share of all requests, drawn by their row in the trace, so that a seed always cuts off the same ones.

    With `mean_s` the user's patience is exponential with that mean. Without it, the user disconnects after a
    number of answer tokens that is uniform over the answer's length. A request that ends earlier is not cut
    off.
    """

    share: float = 0.0
    mean_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SetupError(f"--cancel {self.share:g}: must be a share from 0 to 1")
        if self.mean_s is not None and self.mean_s <= 0:
            raise SetupError(f"--cancel-after {self.mean_s:g}: must be above 0")

    def of(self, row: int, output_tokens: int) -> Disconnect | None:
        """None if the client waits for this request."""
        if not self.share:
            return None
        rng = random.Random(f"hang up {self.seed} {row}")
        if rng.random() >= self.share:
            return None
        if self.mean_s is not None:
            return Disconnect(after_s=rng.expovariate(1 / self.mean_s))
        return Disconnect(after_tokens=rng.randint(1, max(1, output_tokens - 1)))
