"""The bytes that one token stands for, from its piece in the vocabulary. Pure.

Decoding a single token loses them: half a character becomes U+FFFD, and a leading space may be dropped.
"""

import re
from collections.abc import Callable
from typing import Any

from router.text.tokenizer_json import parts_of

TokenBytes = Callable[[int], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_character() -> dict[str, int]:
    """Return the bytes by the characters that a byte-level BPE writes them as (Radford et al. 2019, GPT-2's
    encoder). Printable bytes are written as themselves, the others as U+0100 and on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes_of(tokenizer_json: str, piece_of: Callable[[int], str | None]) -> TokenBytes:
    """Return the bytes of tokens. `tokenizer_json` is the Rust tokenizer as `to_str()` writes it. Unknown ids
    have no bytes."""
    parts = parts_of(tokenizer_json)
    added: dict[int, bytes] = {
        token["id"]: token["content"].encode("utf-8", "replace") for token in parts.added_tokens or []
    }
    decoders = _flat(parts.decoder)
    characters = byte_of_character() if "ByteLevel" in [one["type"] for one in decoders] else None
    space = next((one.get("replacement", "▁") for one in decoders if one["type"] == "Metaspace"), "")
    replaces = [
        (pattern, one["content"])
        for one in decoders
        if one["type"] == "Replace" and (pattern := one["pattern"].get("String"))
    ]

    def token_bytes(token: int) -> bytes:
        if token in added:
            return added[token]
        piece = piece_of(token)
        if piece is None:
            return b""
        if characters is not None and all(char in characters for char in piece):
            return bytes(characters[char] for char in piece)
        if found := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        for pattern, content in replaces:
            piece = piece.replace(pattern, content)
        return (piece.replace(space, " ") if space else piece).encode("utf-8", "replace")

    return token_bytes


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [one for member in decoder["decoders"] for one in _flat(member)]
    return [decoder]
