"""The tokenizer that a GGUF file's metadata describes, as a Hugging Face one. No torch here."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from baton.core.errors import SetupError
from engine.model_files.gguf.reader import GgufHeader

_FIELDS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "add_space_prefix": "add_prefix_space",
}
"""transformers' names for tokenizer.ggml.*"""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(folder: Path, header: GgufHeader) -> None:
    """tokenizer.json and tokenizer_config.json. Raises SetupError: of a kind that is not supported."""
    metadata = header.metadata
    found = {theirs: metadata.get(f"tokenizer.ggml.{name}") for name, theirs in _FIELDS.items()}
    facts = {name: value for name, value in found.items() if value is not None}
    where = header.files[0]
    tokens: list[Any] = facts["tokens"] if isinstance(facts["tokens"], list) else []
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise SetupError(f"{where}: its tokenizer cannot be used: tokenizer.ggml.tokens are no texts")
    try:
        tokenizer, _ = convert_gguf_tokenizer(metadata["general.architecture"], facts)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a library's converter may fail in any way, Rust's panics included
        raise SetupError(f"{where}: its tokenizer cannot be used: {error}") from error
    special = {
        ours: tokens[number]
        for ours, theirs in _SPECIAL.items()
        if isinstance(number := metadata.get(f"tokenizer.ggml.{theirs}_token_id"), int)
        and 0 <= number < len(tokens)
    }
    # llama.cpp begins a SentencePiece text with bos unless told otherwise.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", facts.get("tokenizer_type") == "llama")
    _begin_with(tokenizer, special.get("bos_token") if adds_bos else None)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False) + "\n")


def _begin_with(tokenizer: Tokenizer, bos: str | None) -> None:
    if bos is None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    number = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )
