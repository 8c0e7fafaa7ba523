"""Log probabilities as clients get them, in step with the text. Pure.

A token's entry is sent with the text that it contributed to. It is not sent before, since a stop string may
still cut it, and not at all if it was cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.core.steps import TokenLogprobs
from router.text.token_bytes import TokenBytes

LOGPROB_MIN = -9999.0
"""Stand-in of OpenAI and vLLM for minus infinity, which JSON lacks."""

Entry = tuple[TokenLogprobs, int]
"""Logprobs of a token, with the position in the text at which it begins."""


class UnwrittenLogprobs(NamedTuple):
    """Logprobs of a choice or chunk that are taken and not yet written.

    Writing 20 alternatives of each token takes 0.2 ms per token, so many of them are written in a thread.
    """

    token_count: int
    write: Callable[[], dict[str, Any]]
    """Makes OpenAI's `logprobs`. It may run in any thread."""


class Track:
    """Entries of one choice until their text is sent."""

    __slots__ = ("_arrived", "_held", "ready", "total")

    def __init__(self) -> None:
        self._arrived: list[TokenLogprobs] = []
        self._held: list[Entry] = []
        self.ready: list[Entry] = []
        self.total = 0.0
        """Sum over all tokens that came, including the one that ended the text."""

    def arrived(self, entries: Sequence[TokenLogprobs]) -> None:
        self._arrived += entries
        for entry in entries:
            self.total += entry.logprob

    def pushed(self, start: int, *, is_text: bool) -> None:
        """Note that the next token went through the detokeniser. Its text begins at character `start`."""
        if not self._arrived:
            return  # The worker reported no logprobs.
        entry = self._arrived.pop(0)
        if is_text:
            self._held.append((entry, start))

    def sent(self, characters: int) -> None:
        """Note that so much of the text is sent. Every entry that begins before that end goes with it."""
        held = self._held
        count = next((i for i, (_, start) in enumerate(held) if start >= characters), len(held))
        self.ready += held[:count]
        del held[:count]

    def ended(self, *, is_cut: bool) -> None:
        if not is_cut:
            self.ready += self._held
        self._held.clear()

    def take(self) -> list[Entry]:
        taken, self.ready = self.ready, []
        return taken


class LogprobFormat:
    def __init__(self, token_bytes: TokenBytes, *, tokens_as_ids: bool = False, is_chat: bool) -> None:
        """`tokens_as_ids` writes tokens as token_id:N (vLLM's `return_tokens_as_token_ids`)."""
        self._bytes, self._as_ids = token_bytes, tokens_as_ids
        self._is_chat = is_chat

    def of(self, entries: Sequence[Entry], *, offset: int = 0) -> dict[str, Any]:
        """Return OpenAI's `logprobs` of a choice or chunk. `offset` is the number of characters of the answer
        before its text."""
        if self._is_chat:
            return {"content": [self._chat_entry(entry) for entry, _ in entries], "refusal": None}
        return {
            "tokens": [self._name(entry.token) for entry, _ in entries],
            "token_logprobs": [_finite(entry.logprob) for entry, _ in entries],
            "top_logprobs": [self._top(entry) for entry, _ in entries],
            "text_offset": [offset + start for _, start in entries],
        }

    def of_prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[Any]:
        """Return vLLM's `prompt_logprobs`: null for the first token, then the alternatives by token id."""
        return [None, *(self._by_id(entry) for entry in entries)][: len(tokens)]

    def of_echo(
        self, tokens: Sequence[int], starts: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Return OpenAI's `logprobs` of an echoed prompt. The first token has none."""
        rest = self.of(list(zip(entries, starts[1:], strict=False)))
        return {
            "tokens": [self._name(token) for token in tokens[:1]] + rest["tokens"],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": list(starts[:1]) + rest["text_offset"],
        }

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # OpenAI's way of writing half a character; as U+FFFD all of them would be one key.
            return raw.decode("utf-8", "replace") if self._is_chat else "bytes:" + _escaped(raw)

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return self._chat_token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": list(self._bytes(token))}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and, if it is none of them, the chosen one."""
        pairs = entry.top if any(t == entry.token for t, _ in entry.top) else (
            *entry.top, (entry.token, entry.logprob),
        )  # fmt: skip
        found: dict[str, float] = {}
        for token, logprob in pairs:
            found.setdefault(self._name(token), _finite(logprob))
        return found

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (rank, logprob) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token, (entry.rank, entry.logprob))
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._bytes(token).decode("utf-8", "replace"),
            }
            for token, (rank, logprob) in ranked.items()
        }


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def joined(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return one `logprobs` object for several that follow each other."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    merged: dict[str, Any] = {}
    for part in found:
        for key, value in part.items():
            merged[key] = (merged.get(key) or []) + value if isinstance(value, list) else value
    return merged
