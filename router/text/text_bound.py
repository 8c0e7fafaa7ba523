"""The longest text that may fit into a number of tokens, as far as the kind of tokenizer tells."""

from typing import Any

from router.text.tokenizer_json import TokenizerParts, parts_of, words_of

NFC_SHRINKS = 4
"""Most characters that canonical composition makes one of."""

LOSSLESS_NORMALIZERS = frozenset({"NFC", "Prepend", "Replace"})


def characters_per_token_max(tokenizer_json: str) -> int | None:
    """Return the most characters of a text that one token can stand for. None: there is no such bound.

    There is one where every character of the text is in some token, as in a byte-level or byte-fallback BPE
    whose normaliser drops nothing. Otherwise a single unknown token may stand for a whole word, and a
    normaliser may drop any number of spaces.
    """
    parts = parts_of(tokenizer_json)
    added = parts.added_tokens or []
    normalizers = _flat(parts.normalizer, "normalizers")
    if parts.model.type != "BPE" or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not (parts.model.byte_fallback or _is_byte_level(parts)) or not all(map(_is_lossless, normalizers)):
        return None
    words = [*words_of(parts.model), *(token["content"] for token in added)]
    shrinks = NFC_SHRINKS if any(one.get("type") == "NFC" for one in normalizers) else 1
    return shrinks * max(map(len, words), default=1)


def _flat(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [one for member in part[inner] for one in _flat(member, inner)]
    return [part]


def _is_byte_level(parts: TokenizerParts) -> bool:
    """Return whether the pre-tokeniser maps every byte to a character of the vocabulary. No step may drop
    any."""
    pre = _flat(parts.pre_tokenizer, "pretokenizers")
    drops = any(one.get("behavior") == "Removed" for one in pre)
    return not drops and any(one.get("type") == "ByteLevel" for one in pre)


def _is_lossless(normalizer: dict[str, Any]) -> bool:
    if normalizer.get("type") == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        return pattern is not None and len(pattern) <= len(normalizer.get("content", ""))
    return normalizer.get("type") in LOSSLESS_NORMALIZERS
