"""Token ids in, text out, as a stream: no broken characters, and nothing of a stop string.

Pure and synchronous, with one `Detokenizer` per choice. It works with any `decode` function, through the two
offsets that text-generation-inference and vLLM use. The window holds the tokens of the previous delta and
those whose text is not sent yet; the delta is what the latter add to the text of the former. The tokens of
the previous delta stay so that a decoder which drops the first token's space drops it where it did before.
`tokenizers.DecodeStream` does the same, but it has no flush, does not bound what it holds back, and raises
where a byte-fallback decoder revises earlier text.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""A function from token ids to text. Special tokens never reach it."""

REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are not UTF-8, including an unfinished character at the end.
"""

HELD_TOKENS_MAX = 16
"""A character has at most 4 bytes: more unsent tokens than that are broken bytes, not half a character."""


class TextWindow:
    """Incremental decoding. The deltas and `flush()` together are `decode` of all tokens."""

    __slots__ = ("_context_count", "_context_text", "_decode", "_ids")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context` has the prompt's last tokens, which decide whether the first word begins with a space."""
        self._decode = decode
        self._ids = list(context)
        self._context_count = len(self._ids)
        self._context_text = decode(self._ids) if self._ids else ""
        if self._context_text.endswith(REPLACEMENT):
            self._ids, self._context_count, self._context_text = [], 0, ""

    def push(self, token: int) -> str:
        """Return the text that is certain now. It never ends inside a character.

        Tokens come one at a time: where bytes have tokens of their own, a decoder writes a whole run of them
        as broken while its last character is unfinished, so every chance to cut must be taken.
        """
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._cut(text, len(self._ids))
        if len(self._ids) - self._context_count > HELD_TOKENS_MAX:
            return self._cut_between_broken_bytes(text)
        return ""

    def push_all(self, tokens: Sequence[int]) -> str:
        """Push several tokens, in one step if that can make no difference."""
        ids = [*self._ids, *tokens]
        text, last = self._decode(ids), self._decode(ids[-1:])
        if not last or REPLACEMENT in text or REPLACEMENT in last:
            return "".join([self.push(token) for token in tokens])
        delta = text[len(self._context_text) :]
        self._ids, self._context_count, self._context_text = ids[-1:], 1, last
        return delta

    def flush(self) -> str:
        """Return the text that is left at the end. An unfinished character becomes U+FFFD."""
        return self._cut(self._decode(self._ids), len(self._ids)) if self._ids else ""

    def _cut(self, text: str, count: int) -> str:
        """Return the next delta. `text` is that of the window's first `count` tokens, which become the
        context."""
        delta = text[len(self._context_text) :]
        # Tokens without any text (a lone space that the decoder drops) stay, and decide what follows.
        drop = self._context_count if delta else max(0, count - HELD_TOKENS_MAX)
        del self._ids[:drop]
        self._context_count = count - drop
        self._context_text = self._decode(self._ids[: self._context_count])
        return delta

    def _cut_between_broken_bytes(self, text: str) -> str:
        """Send all but the last few tokens, which may still be the beginning of a character.

        A cut is between two characters exactly if the texts of both sides add up to the whole.
        """
        for count in range(len(self._ids) - 1, len(self._ids) - 5, -1):
            head = self._decode(self._ids[:count])
            if head + self._decode(self._ids[count:]) == text:
                delta = head[len(self._context_text) :]
                del self._ids[: count - 1]
                self._context_count = 1
                self._context_text = self._decode(self._ids[:1])
                return delta
        return self._cut(text, len(self._ids))


class StopFinder:
    """A finder of stop strings. It cuts text at the first one, and holds back what may be the beginning of
    one.

    The first stop string is the one that is complete first; of several that are complete at the same
    character, the longest. So the result does not depend on how the text is cut into deltas.
    """

    __slots__ = ("_held", "_keeps_stop", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`keeps_stop` keeps the found stop string in the text."""
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain not to belong to a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            self._held = ""
            return text[: at + len(self.found)] if self._keeps_stop else text[:at]
        keep = min((self._beginning(text, stop) for stop in self._stops), default=len(text))
        self._held = text[keep:]
        return text[:keep]

    @property
    def held_characters(self) -> int:
        return len(self._held)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Return the position of the longest end of `text` that is a beginning of `stop`. len(text): there is
        none."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)


class Detokenizer:
    """The text of one choice.

    special_ids   tokens that are never text (also when the client ignores end-of-sequence)
    stop_ids      tokens that end the text and are not part of it
    stops         strings that end the text and are not part of it
    context       the prompt's last tokens, see `TextWindow`
    keeps_stop    the stop string or token that ends the text is part of it
    min_tokens    number of tokens in which no stop string is looked for
    """

    __slots__ = (
        "_finder",
        "_keeps_stop",
        "_min_tokens",
        "_not_plain",
        "_special_ids",
        "_stop_ids",
        "_window",
        "stopped",
        "token_count",
    )

    def __init__(
        self,
        decode: Decode,
        *,
        special_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
        context: Sequence[int] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._window = TextWindow(decode, [i for i in context if i not in special_ids])
        self._finder = StopFinder(stops, keeps_stop=keeps_stop) if stops else None
        self._keeps_stop, self._min_tokens = keeps_stop, min_tokens
        self._special_ids, self._stop_ids = special_ids, stop_ids
        self._not_plain = special_ids | stop_ids
        self.stopped = False
        """True once a stop string or stop token was met. Further tokens change nothing."""
        self.token_count = 0
        """Number of tokens up to and including the one that stopped the text."""

    @property
    def found_stop_string(self) -> bool:
        return self._finder is not None and self._finder.found is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._finder is None else self._finder.found

    @property
    def held_characters(self) -> int:
        """Number of characters that are decoded but not sent, since they may be the beginning of a stop
        string."""
        return 0 if self._finder is None else self._finder.held_characters

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text to send now."""
        if self._finder is None and not self.stopped and self._not_plain.isdisjoint(tokens):
            self.token_count += len(tokens)
            return self._window.push_all(tokens) if tokens else ""
        return "".join([self._text_of(token) for token in tokens])

    def finish(self) -> str:
        """Return the text that was held back, once, when no more tokens come."""
        if self._finder is None:
            return self._window.flush()
        if self._finder.found is not None:
            return ""
        text = self._finder.push(self._window.flush())
        if self._finder.found is not None:
            self.stopped = True
            return text
        return text + self._finder.flush()

    def _text_of(self, token: int) -> str:
        if self.stopped:
            return ""
        self.token_count += 1
        if token in self._stop_ids:
            self.stopped = True
            if not self._keeps_stop:
                return ""
        if token in self._special_ids:
            return ""
        text = self._window.push(token)
        if self._finder is None or not text or self.token_count <= self._min_tokens:
            return text
        text = self._finder.push(text)
        self.stopped = self._finder.found is not None
        return text
