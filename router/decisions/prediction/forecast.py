"""What is expected of one sequence at one place: values that placement, admission and metrics share."""

from typing import NamedTuple

from router.decisions.stored_prefix import StoredPrefix


class Forecast(NamedTuple):
    """Seconds from now, if the sequence were placed there now. The parts of `ttft_s` follow one another."""

    wait_s: float
    """Behind what the prefill worker does and has accepted."""
    load_s: float
    """Bringing cached spans from where they are, as far as computing does not hide it."""
    compute_s: float
    """What no tier holds."""
    hop_s: float
    """Messages between router and worker."""
    exposed_transfer_s: float
    """From the first token to the decode worker's batch: delays the second token, not the first."""
    tpot_s: float
    """Of the decode worker, at the time when this sequence will decode there, with it in the batch."""
    seen_tpot_s: float
    """As its client will measure it: the second token's delay by the hand-over included."""
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


class Want(NamedTuple):
    """One sequence, as predictions need it."""

    tokens: int
    """Prompt, and what was generated before."""
    priority: int
    tokens_max: int
    """That may be generated yet."""
    ttft_slo_s: float
    tpot_slo_s: float
    waited_s: float
    """Since it arrived."""
    adapter: str = ""
    stored: StoredPrefix | None = None
    """What the hosts' stores have of the prompt."""


class Prefill(NamedTuple):
    """Of one prompt at one worker. Seconds, corrected; `raw_*` as the model says."""

    wait_s: float
    compute_s: float
    hop_s: float
    raw_wait_s: float
    raw_compute_s: float
    load_s: float = 0.0
    """Of an adapter that is not loaded there."""
    bring_s: float = 0.0
    """Bringing blocks of the store, as far as the wait does not hide it."""
    raw_bring_s: float = 0.0
    """The whole of it; 0: nothing is brought."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.load_s + self.bring_s + self.compute_s + self.hop_s


class Predicted(NamedTuple):
    """What was said of a sequence when it was placed; compared with what happens."""

    prefill: Prefill
    raw_tpot_s: float
    tpot_s: float
    exposed_s: float
