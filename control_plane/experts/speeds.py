"""Ranks of unlike speed. R is the number of ranks."""

from collections.abc import Sequence

import numpy as np

from control_plane.experts.replicas import Counts
from control_plane.experts.values import ExpertRank, Loads

SPEED_MIN = 0.05
"""A rank of which nearly nothing is left counts as one with this part of the fastest's speed."""
SLOW = 0.8
"""Ranks below this part of the median speed use a part of their slots only: with all of them, even the
smallest replicas might be too much."""


def speeds_of(ranks: Sequence[ExpertRank]) -> Loads:
    """Speeds of ranks as [R], with a mean of 1."""
    speeds = np.array([rank.speed for rank in ranks])
    speeds = np.maximum(speeds, speeds.max() * SPEED_MIN)
    return speeds / speeds.mean()


def slots_to_use(slots: Counts, speeds: Loads, *, needed: int) -> Counts:
    """Slots that each rank shall use as [R]: fewer on slow ranks, but `needed` of all ranks, or all."""
    parts = speeds / np.median(speeds)
    parts = np.where(parts < SLOW, parts, 1.0)
    while True:
        used = np.ceil(slots * parts - 1e-9).astype(np.int64)
        if used.sum() >= min(needed, slots.sum()):
            return used
        parts = np.minimum(1.0, parts * 1.1)
