"""Prediction inputs that depend on the worker alone. They are made once per change of the worker."""

from typing import NamedTuple

from router.decisions.prediction.prompt_steps import PromptSteps


class Outlook(NamedTuple):
    """Seconds are the model's uncorrected values, and the factors correct them."""

    decoding: float
    """Number of sequences that decode there now."""
    mean_context: float
    """Mean tokens of a sequence that decodes there, now or later."""
    beside_s: float
    """Seconds that the decoding sequences add to a step."""
    step_s: float
    """Seconds of a step that only decodes."""
    prompts: PromptSteps
    """Steps with prompts in them."""
    head_s: float
    """Seconds of the prompt that is computed now, from its beginning."""
    hop_s: float
    wait_factor: float
    compute_factor: float
    store_load_factor: float
    tpot_factor: float
    ttft_sigma: float
    tpot_sigma: float
