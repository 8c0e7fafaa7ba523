"""How good predictions are: for /health, metrics and the dashboard."""

import msgspec

from router.decisions.prediction.speed import Speed


class PredictionErrors(msgspec.Struct, frozen=True):
    """Of one worker, over its latest 100 sequences; 0 while there are none."""

    ttft_count: int
    ttft_mape: float
    """Mean of |predicted - actual| / actual, from being placed to the first token."""
    ttft_bias: float
    """Mean of (predicted - actual) / actual: above 0, too much was predicted."""
    tpot_count: int
    tpot_mape: float
    tpot_bias: float
    change_count: int
    """Times that its behaviour was seen to change."""

    @classmethod
    def of(cls, speed: Speed) -> "PredictionErrors":
        ttft, tpot = speed.ttft_errors, speed.tpot_errors
        return cls(ttft.count, ttft.mape, ttft.bias, tpot.count, tpot.mape, tpot.bias, speed.change_count)


class PredictorStatus(msgspec.Struct, frozen=True):
    is_in_use: bool
    """The configured policy predicts."""
    is_trusted: bool
    """False: placement is by cached prefix until predictions are better."""
    error: float
    """Smoothed relative error beyond what matters, compared with `router.predictor_error_max`."""
    fallback_count: int
    """Times that it was not trusted any more."""
