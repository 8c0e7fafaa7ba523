"""How good predictions are: for /health, metrics and the dashboard."""

import msgspec

from router.decisions.prediction.corrections import WorkerCorrections


class PredictionErrors(msgspec.Struct, frozen=True):
    """The errors at one worker, over its latest 100 sequences; 0 while there are none."""

    ttft_count: int
    ttft_mape: float
    """Mean of |predicted - actual| / actual, from being placed to the first token."""
    ttft_bias: float
    """Mean of (predicted - actual) / actual: above 0, too much was predicted."""
    tpot_count: int
    tpot_mape: float
    tpot_bias: float
    change_count: int
    """How often a change of the worker's behaviour was noticed."""

    @classmethod
    def of(cls, learnt: WorkerCorrections) -> "PredictionErrors":
        ttft, tpot = learnt.ttft_errors, learnt.tpot_errors
        return cls(ttft.count, ttft.mape, ttft.bias, tpot.count, tpot.mape, tpot.bias, learnt.change_count)


class ClassCalibration(msgspec.Struct, frozen=True):
    """Whether what was predicted with 90 % held as often, lately and over the sequences of one service class;
    0 while there are none."""

    slo_class: str
    ttft_count: int
    ttft_held: float
    """Share of sequences whose TTFT was at most the one predicted with 90 %."""
    tpot_count: int
    tpot_held: float


class PredictorStatus(msgspec.Struct, frozen=True):
    is_in_use: bool
    """The configured policy predicts."""
    is_trusted: bool
    """False: placement is by cached prefix until predictions are better."""
    error: float
    """Smoothed relative error beyond what matters, compared with `router.predictor_error_max`."""
    fallback_count: int
    """How often predictions lost that trust."""
    calibration: tuple[ClassCalibration, ...] = ()
    """One entry per service class, ordered by name."""
