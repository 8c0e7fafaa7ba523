"""The parts of a tokenizer.json that are asked for. Pure.

Words and merges stay text: as Python's objects they take 30 times the memory of the file.
"""

from typing import Any

import msgspec


class ModelPart(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None
    byte_fallback: bool | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class TokenizerParts(msgspec.Struct):
    model: ModelPart
    added_tokens: list[dict[str, Any]] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def parts_of(tokenizer_json: str) -> TokenizerParts:
    """`tokenizer_json` is a Rust tokenizer as `to_str()` writes it. Raises msgspec.DecodeError."""
    return msgspec.json.decode(tokenizer_json, type=TokenizerParts)


def words_of(model: ModelPart) -> dict[str, int]:
    """The vocabulary of a byte-pair encoding."""
    return msgspec.json.decode(model.vocab, type=dict[str, int])
