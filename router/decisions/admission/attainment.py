"""How likely it is that a sequence meets its objectives. Pure."""

import math
from typing import NamedTuple

from router.decisions.events import Submit
from router.decisions.prediction.forecast import Forecast

QUEUE_SIGMA = 0.3
"""Standard deviation of ln(actual / predicted) of a wait in the admission queue."""


class Attainment(NamedTuple):
    ttft: float
    """Probability that the TTFT objective holds; 1 without one."""
    tpot: float

    @property
    def both(self) -> float:
        return self.ttft * self.tpot


def below(limit_s: float, predicted_s: float, sigma: float) -> float:
    """P(actual <= limit), if ln(actual / predicted) is normal with this standard deviation."""
    if limit_s <= 0:
        return 0.0
    if predicted_s <= 0:
        return 1.0
    return 0.5 * math.erfc(-math.log(limit_s / predicted_s) / (max(sigma, 1e-3) * math.sqrt(2)))


def attainment(forecast: Forecast, *, left_s: float, tpot_slo_s: float, queue_s: float = 0.0) -> Attainment:
    """`left_s`: until the first token is due, infinite without objective; `queue_s`: to be waited before
    the sequence is placed as forecast. `tpot_slo_s` 0: no objective.

    The decode worker's load is that of the time when the sequence will decode, prefills on their way
    included: refusing by what it is now lets both pools swing in turn (Mooncake, FAST 2025, section 7).
    """
    ttft_s = queue_s + forecast.ttft_s
    sigma = forecast.ttft_sigma
    if queue_s > 0:
        sigma = math.hypot(forecast.ttft_s * sigma, queue_s * QUEUE_SIGMA) / ttft_s
    return Attainment(
        1.0 if left_s == math.inf else below(left_s, ttft_s, sigma),
        below(tpot_slo_s, forecast.tpot_s, forecast.tpot_sigma) if tpot_slo_s > 0 else 1.0,
    )


def unmet_objectives(submit: Submit, forecast: Forecast, found: Attainment) -> str:
    """Return in words what a client was predicted to get, beside what it asked for."""
    parts: list[str] = []
    if submit.ttft_slo_s > 0:
        parts.append(
            f"first token {forecast.ttft_s:.2f} s after placement, objective {submit.ttft_slo_s:g} s"
        )
    if submit.tpot_slo_s > 0:
        parts.append(f"{forecast.tpot_s:.3f} s per token, objective {submit.tpot_slo_s:g} s")
    return f"predicted {'; '.join(parts)}; both hold with a probability of {found.both:.0%}"
