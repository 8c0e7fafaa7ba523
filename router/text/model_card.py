"""Facts that the router needs of a model: how long a sequence may be, which ids exist, which ones end it."""

from pathlib import Path
from typing import Any, cast

import msgspec

from baton.core.errors import PromptTooLong, SetupError
from engine.model_files.json_files import read_json_object
from engine.model_files.read_spec import load_spec
from router.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults


class ModelCard(msgspec.Struct, frozen=True):
    context_tokens: int
    """Most prompt and generated tokens of one sequence together."""
    vocab_size: int
    """Number of token ids, which are 0 … vocab_size-1."""
    eos_token_ids: tuple[int, ...]
    model_type: str = ""
    hidden_size: int = 0
    """Number of values in an embedding."""
    layer_count: int = 0
    sampling: SamplingDefaults = NO_DEFAULTS
    """Sampling of requests that leave it out."""
    matryoshka_dimensions: tuple[int, ...] | None = None
    """Lengths that embeddings may be cut to. Empty: any length; None: embeddings may not be cut."""


def prompt_too_long(prompt_tokens: int, context_tokens: int, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {context_tokens} tokens, and the {field} has "
        f"{prompt_tokens}; at least one must be left for the answer.",
        param=field,
    )


def _matryoshka(config: dict[str, Any], folder: Path) -> tuple[int, ...] | None:
    """Return the allowed lengths as sentence-transformers and vLLM read them: `matryoshka_dimensions`, or
    `is_matryoshka` for any."""
    dimensions = config.get("matryoshka_dimensions")
    if isinstance(dimensions, list):
        listed = cast(list[object], dimensions)
        if not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in listed):
            raise SetupError(f"{folder}/config.json: matryoshka_dimensions must be whole numbers above 0")
        return tuple(cast(list[int], listed))
    return () if config.get("is_matryoshka") else None


def read_model_card(folder: Path) -> ModelCard:
    """Read the facts from a model folder. Raises SetupError if there is none, or the model cannot be served;
    see `load_spec`."""
    spec = load_spec(folder)
    config = read_json_object(folder / "config.json") or {}
    return ModelCard(
        spec.context_tokens,
        spec.vocab_size,
        spec.eos_token_ids,
        model_type=str(config.get("model_type", "")),
        hidden_size=spec.hidden_size,
        layer_count=spec.layer_count,
        matryoshka_dimensions=_matryoshka(config, folder),
    )
