"""What the router must know of a model: how long a sequence may be, which ids exist, which ones end it."""

from pathlib import Path

import msgspec

from baton.core.errors import PromptTooLong
from baton.engine.models.read import load_spec


class ModelCard(msgspec.Struct, frozen=True):
    context_tokens: int
    """Prompt plus generated tokens of one sequence, at most."""
    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    eos_token_ids: tuple[int, ...]


def prompt_too_long(prompt_tokens: int, context_tokens: int, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {context_tokens} tokens, and the {field} has "
        f"{prompt_tokens}; at least one must be left for the answer.",
        param=field,
    )


def read_model_card(folder: Path) -> ModelCard:
    """Raises SetupError: no model folder, or a model that cannot be served; see `load_spec`."""
    spec = load_spec(folder)
    return ModelCard(spec.context_tokens, spec.vocab_size, spec.eos_token_ids)
