"""What the router must know of a model: how long a sequence may be, which ids exist, which ones end it."""

import json
from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import PromptTooLong, SetupError


class ModelCard(msgspec.Struct, frozen=True):
    context_tokens: int
    """Prompt plus generated tokens of one sequence, at most."""
    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    eos_token_ids: tuple[int, ...]
    model_type: str = ""
    hidden_size: int = 0
    """Numbers in an embedding."""
    matryoshka_dimensions: tuple[int, ...] | None = None
    """Lengths that embeddings may be cut to; empty: any; None: they may not."""


def prompt_too_long(prompt_tokens: int, context_tokens: int, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {context_tokens} tokens, and the {field} has "
        f"{prompt_tokens}; at least one must be left for the answer.",
        param=field,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} does not hold a JSON object")
    return value


def _matryoshka(config: dict[str, Any]) -> tuple[int, ...] | None:
    """As sentence-transformers and vLLM read it: `matryoshka_dimensions`, or `is_matryoshka` for any."""
    dimensions = config.get("matryoshka_dimensions")
    if isinstance(dimensions, list):
        return tuple(int(one) for one in dimensions)
    return () if config.get("is_matryoshka") else None


def read_model_card(folder: Path) -> ModelCard:
    """From config.json and generation_config.json; the latter has the last word on what ends a text.

    Raises SetupError if config.json is missing or says neither the context nor the vocabulary.
    """
    config = _read(folder / "config.json")
    if not config:
        raise SetupError(f"{folder} has no config.json: not a model folder")
    config = config | config.get("text_config", {}) | {"model_type": config.get("model_type", "")}
    eos = _read(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    try:
        return ModelCard(
            context_tokens=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            model_type=str(config.get("model_type", "")),
            hidden_size=int(config.get("hidden_size", 0)),
            matryoshka_dimensions=_matryoshka(config),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{folder}/config.json lacks a usable field: {error}") from error
