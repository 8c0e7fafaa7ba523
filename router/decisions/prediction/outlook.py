"""What predictions need of one worker and no sequence changes: made once per change of the worker, not once
per decision."""

from typing import NamedTuple


class Outlook(NamedTuple):
    """Seconds are as the model says, factors correct them."""

    decoding: float
    """Sequences that decode there now."""
    mean_context: float
    """Mean tokens of a sequence that decodes there, now or later."""
    beside_s: float
    """What those that decode now add to a step."""
    step_s: float
    """Seconds of a step that only decodes."""
    chunk_tokens: int
    """Prompt tokens in one step beside them."""
    token_s: float
    """Per prompt token of full steps."""
    head_s: float
    """The prompt under way, from its beginning."""
    hop_s: float
    wait_factor: float
    compute_factor: float
    store_load_factor: float
    tpot_factor: float
    ttft_sigma: float
    tpot_sigma: float
