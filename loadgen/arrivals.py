"""When each request is fired. Pure: open loop, so nothing here knows what the server does."""

import random
from collections.abc import Sequence
from itertools import groupby


def spread_ticks(instants_s: Sequence[float], *, tick_s: float, seed: int) -> list[float]:
    """Spread what a trace stamped with one tick over that tick, uniformly.

    The instants must be sorted; the order of requests is kept, because it decides what a cache holds.
    Without this a replay arrives in batches that no client sent. `tick_s` 0 changes nothing.
    """
    if tick_s <= 0:
        return list(instants_s)
    rng = random.Random(seed)
    spread: list[float] = []
    for instant_s, same in groupby(instants_s):
        spread += sorted(instant_s + rng.random() * tick_s for _ in same)
    return spread
