"""Counts of tokens per layer and expert, one [L, E] for each time that experts are placed anew.

Synthetic ones are Poisson counts around shares of the load.
"""

import numpy as np

from control_plane.experts.values import Loads

TOKENS_PER_EXPERT = 4096
"""Mean tokens of an expert between two placements."""
MOVING_PART = 0.1
"""Part of the experts that exchange their shares of the load from one placement to the next."""
ZIPF_EXPONENT = 1.0
HALF = 0.5
FEW, MOST_LOAD = 1 / 16, 0.9


def uniform(times: int, layers: int, experts: int, *, seed: int) -> list[Loads]:
    """All experts are equally likely."""
    random = np.random.default_rng(seed)
    return [_drawn(np.full((layers, experts), 1 / experts), random) for _ in range(times)]


def zipf(times: int, layers: int, experts: int, *, seed: int) -> list[Loads]:
    """Zipf shares, of which a part moves to other experts every time."""
    random = np.random.default_rng(seed)
    shares = _zipf_shares(layers, experts, random)
    found: list[Loads] = []
    for _ in range(times):
        found.append(_drawn(shares, random))
        shares = shares.copy()
        for of_layer in shares:
            moving = random.choice(experts, max(2, int(experts * MOVING_PART)), replace=False)
            of_layer[moving] = of_layer[random.permutation(moving)]
    return found


def adversarial(times: int, layers: int, experts: int, *, seed: int) -> list[Loads]:
    """Shares that have nothing to do with those before: in turn Zipf shares of other experts, half of the
    load on one expert, and nearly all of it on neighbours, which the first placement may have put on one
    rank."""
    random = np.random.default_rng(seed)
    found: list[Loads] = []
    for number in range(times):
        shares = _zipf_shares(layers, experts, random)
        if number % 3 == 1:
            shares = np.full((layers, experts), (1 - HALF) / (experts - 1))
            shares[np.arange(layers), random.integers(experts, size=layers)] = HALF
        elif number % 3 == 2:
            few = max(1, int(experts * FEW))
            shares = np.full((layers, experts), (1 - MOST_LOAD) / (experts - few))
            first = random.integers(experts - few + 1)
            shares[:, first : first + few] = MOST_LOAD / few
        found.append(_drawn(shares, random))
    return found


def _zipf_shares(layers: int, experts: int, random: np.random.Generator) -> Loads:
    shares: Loads = np.arange(1, experts + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    shares /= shares.sum()
    return np.stack([shares[random.permutation(experts)] for _ in range(layers)])


def _drawn(shares: Loads, random: np.random.Generator) -> Loads:
    return random.poisson(shares * TOKENS_PER_EXPERT * shares.shape[1]).astype(np.float64)
