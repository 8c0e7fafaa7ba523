"""What is expected of one sequence at one place: values that placement, admission and metrics share."""

from typing import NamedTuple

from router.decisions.stored_prefix import StoredPrefix


class Forecast(NamedTuple):
    """Seconds from now, if the sequence were placed there now. The parts of `ttft_s` follow one another."""

    wait_s: float
    """The wait behind what the prefill worker does and has accepted."""
    load_s: float
    """Bringing cached spans from where they are, as far as computing does not hide it."""
    compute_s: float
    """Computing what no tier holds."""
    hop_s: float
    """Messages between router and worker."""
    exposed_transfer_s: float
    """The time from the first token to the decode worker's batch: delays the second token, not the first."""
    tpot_s: float
    """TPOT of the decode worker when this sequence will decode there, with it in the batch."""
    seen_tpot_s: float
    """TPOT as the client will measure it: the delay of the second token by the hand-over is part of it."""
    ttft_sigma: float
    """Standard deviation of ln(actual / predicted) of TTFT, as it was lately."""
    tpot_sigma: float
    meets: float
    """Probability that both objectives hold, given how long the sequence has waited already. 1 without
    objectives."""
    cost_s: float
    """Seconds of the workers' time that this placement takes, what it costs others included."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.load_s + self.compute_s + self.hop_s


class SequenceNeeds(NamedTuple):
    """One sequence, as predictions need it."""

    tokens: int
    """Tokens of the prompt, and of what was generated before."""
    priority: int
    tokens_max: int
    """Tokens that may be generated yet."""
    ttft_slo_s: float
    tpot_slo_s: float
    waited_s: float
    """Time since it arrived."""
    adapter: str = ""
    stored: StoredPrefix | None = None
    """What the hosts' stores have of the prompt."""


class PrefillForecast(NamedTuple):
    """One prompt at one worker. Seconds, corrected; `raw_*` are as the model says."""

    wait_s: float
    compute_s: float
    hop_s: float
    raw_wait_s: float
    raw_compute_s: float
    load_s: float = 0.0
    """Loading an adapter that is not there."""
    store_load_s: float = 0.0
    """Bringing blocks of the store, as far as the wait does not hide it."""
    raw_store_load_s: float = 0.0
    """Bringing blocks of the store, the whole of it; 0: nothing is brought."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.load_s + self.store_load_s + self.compute_s + self.hop_s


class Prediction(NamedTuple):
    """What was predicted of a sequence when it was placed; compared with what happens."""

    prefill: PrefillForecast
    raw_tpot_s: float
    tpot_s: float
    exposed_s: float
