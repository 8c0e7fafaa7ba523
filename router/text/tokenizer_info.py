"""What a tokenizer is made of, as clients that use it from afar want to know it. Pure."""

from typing import Any


def tokenizer_info(pretrained: Any) -> dict[str, Any]:
    """Return the facts of a transformers tokenizer as JSON values: its class, special tokens and chat
    template, under the names of tokenizer_config.json."""
    facts: dict[str, Any] = {
        str(name): _plain(value)
        for name, value in pretrained.init_kwargs.items()
        if not str(name).endswith(("_file", "name_or_path")) and _is_plain(value)
    }
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    facts |= {name: _plain(token) for name in names if (token := getattr(pretrained, name, None)) is not None}
    return facts | {
        "tokenizer_class": type(pretrained).__name__,
        "chat_template": pretrained.chat_template,
        "vocab_size": len(pretrained),
        "model_max_length": _bounded(pretrained.model_max_length),
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float) or hasattr(value, "content")


def _plain(value: Any) -> Any:
    """Return an added token as its text, and anything else as it is."""
    return value.content if hasattr(value, "content") else _bounded(value)


def _bounded(value: Any) -> Any:
    """Return a number that JSON readers take. transformers writes 10**30 where there is no length."""
    return None if isinstance(value, int | float) and abs(value) >= 2**53 else value
