"""Predictions for one sequence at one placement, as placement, admission and metrics share them."""

from typing import NamedTuple

from router.decisions.prediction.distribution import NORMAL, ErrorDistribution
from router.decisions.stored_prefix import StoredPrefix

TPOT_SIGMA = 0.2
"""Unit of errors of the TPOT that clients see: ln(actual / predicted) of an unsurprising one."""


class Forecast(NamedTuple):
    """Seconds from now, if the sequence were placed there now. The parts of `ttft_s` follow one another."""

    wait_s: float
    """The wait behind what the prefill worker does and has accepted."""
    load_s: float
    """Loading an adapter and cached blocks, as far as the wait does not hide it."""
    compute_s: float
    """Computing the tokens that no tier holds."""
    hop_s: float
    """Messages between router and worker."""
    exposed_transfer_s: float
    """The time from the first token until the sequence joins the decode worker's batch. It delays the second
    token."""
    tpot_s: float
    """TPOT of the decode worker when this sequence will decode there, with it in the batch."""
    seen_tpot_s: float
    """TPOT as the client will measure it, given what became of such predictions. The delay of the second
    token by the hand-over is part of it."""
    ttft_sigma: float
    """Standard deviation of ln(actual / predicted) of TTFT, as it was lately."""
    tpot_sigma: float
    """The same of TPOT."""
    meets: float
    """Probability that both objectives hold, given how long the sequence has waited already, as such
    probabilities turned out lately. 1 without objectives."""
    cost_s: float
    """Seconds of the workers' time that this placement takes, what it costs others included."""
    said_meets: float = 1.0
    """`meets` as the model says it, which placement compares."""
    ttft_errors: ErrorDistribution = NORMAL
    """Errors of TTFT, in units of `ttft_sigma`, of sequences of this class."""
    tpot_errors: ErrorDistribution = NORMAL
    """Errors of `seen_tpot_s`, in units of `TPOT_SIGMA`."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.load_s + self.compute_s + self.hop_s

    def ttft_quantile_s(self, level: float) -> float:
        """Seconds that the TTFT is predicted not to exceed in a share `level` of cases."""
        return self.ttft_errors.quantile_s(level, self.ttft_s, self.ttft_sigma)

    def tpot_quantile_s(self, level: float) -> float:
        """Seconds that the TPOT is predicted not to exceed, as the client measures it."""
        return self.tpot_errors.quantile_s(level, self.seen_tpot_s, TPOT_SIGMA)


class SequenceNeeds(NamedTuple):
    """What predictions need to know of one sequence."""

    tokens: int
    """Tokens of the prompt, and of what was generated before."""
    priority: int
    tokens_max: int
    """Tokens that may still be generated."""
    ttft_slo_s: float
    tpot_slo_s: float
    waited_s: float
    """Time since it arrived."""
    adapter: str = ""
    stored: StoredPrefix | None = None
    """What the hosts' stores have of the prompt."""
    slo_class: str = ""


class PrefillForecast(NamedTuple):
    """One prompt at one worker, in corrected seconds. The `raw_*` fields are the model's uncorrected
    values."""

    wait_s: float
    compute_s: float
    hop_s: float
    raw_wait_s: float
    raw_compute_s: float
    load_s: float = 0.0
    """Loading an adapter that the worker lacks."""
    store_load_s: float = 0.0
    """Loading blocks from the store, as far as the wait does not hide it."""
    raw_store_load_s: float = 0.0
    """The whole time of loading blocks from the store; 0 if none are loaded."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.load_s + self.store_load_s + self.compute_s + self.hop_s


class Prediction(NamedTuple):
    """What was predicted for a sequence when it was placed, to be compared with what happens."""

    prefill: PrefillForecast
    raw_tpot_s: float
    tpot_s: float
    exposed_s: float
    plain_tpot_s: float = 0.0
    """TPOT as the client would measure it if the present load lasted. 0: it was not predicted."""
    seen_tpot_s: float = 0.0
    """TPOT as the client will measure it, given what became of such predictions."""
    ttft_sigma: float = 1.0
    """Expected spread of ln(actual / predicted) of TTFT."""
    ttft_errors: ErrorDistribution = NORMAL
    """Expected errors of TTFT in units of `ttft_sigma`."""
    tpot_errors: ErrorDistribution = NORMAL
    """Expected errors of `seen_tpot_s` in units of `TPOT_SIGMA`."""
    slo_class: str = ""
