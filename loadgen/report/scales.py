"""The most stringent targets that a run still attains, as a factor on both (the SLO scale). Pure.

This follows DistServe (OSDI '24) section 6.2, second rows of figures 8 and 9: the rate is fixed, both targets
are multiplied by one number, and the most stringent one that attains the goal is found. One run's records
answer that for every scale.
"""

import math
from collections.abc import Sequence

import numpy as np

from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report.model import ScalePoint, SloScales
from loadgen.report.sample import Floats
from loadgen.slo import ClassObjectives

DEFAULT_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def needed_scales(records: Sequence[RequestRecord], objectives: ClassObjectives) -> Floats:
    """The least scale at which each judged request meets both targets, ascending; infinite if none does."""
    needs = [objectives.of(r).needed_scale(r) for r in records if r.outcome is not RequestOutcome.CANCELLED]
    return np.sort(np.array(needs, dtype=np.float64))


def attained_at(needed: Floats, scale: float) -> float:
    """Share of requests that meet both targets times `scale`."""
    return float(np.searchsorted(needed, scale, side="right")) / len(needed) if len(needed) else 0.0


def slo_scales(
    records: Sequence[RequestRecord],
    objectives: ClassObjectives,
    *,
    attain: float,
    scales: Sequence[float] = DEFAULT_SCALES,
) -> SloScales:
    needed = needed_scales(records, objectives)
    points = tuple(ScalePoint(scale, attained_at(needed, scale)) for scale in sorted(scales))
    return SloScales(points, most_stringent(needed, attain=attain))


def most_stringent(needed: Floats, *, attain: float) -> float | None:
    """The least scale with a share of at least `attain`; None if no scale has one."""
    if not len(needed):
        return None
    rank = max(1, math.ceil(attain * len(needed) - 1e-9))
    scale = float(needed[rank - 1])
    return scale if math.isfinite(scale) else None
