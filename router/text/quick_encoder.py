"""Text to ids by fastokens, where it gives exactly the ids of the tokenizers library in a tenth of the time.

fastokens (https://github.com/crusoecloud/fastokens) reads the same tokenizer.json. It knows byte-pair
encodings with the usual normalisers and splits. There is no quick encoder for other tokenizers, nor where the
two were seen to differ; the tokenizers library then does all the work. Each model's encoder is also tested
when it is loaded: both encode the probes below and every word of the vocabulary.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import fastokens

from router.text.tokenizer_json import TokenizerParts, parts_of

PROBES = (
    "",
    " ",
    "The quick brown fox; it's what we'd expect, isn't it?  Two  spaces\tand\ttabs.",
    "line\n\n  indented\r\n\tcode(x): return {'a': [1, 22, 333, 4444]}  # 3.14159e-10\n\n\n",
    "    four spaces, trailing   ",
    "Grüße naïve café e\u0301 \u212b ﬁ ſ İ ß Ⅷ ² ٣٤ \u200d\ufeff\u00a0\u3000|",
    "漢字かなカナ 한국어 Привет мир مرحبا שלום हिन्दी ไทย 😀👨\u200d👩\u200d👧🇩🇪",
    "!?...---___***///\\\\<<>>@@##$$%%^^&&((''\"\"``~~",
    "\x00\x01\x7f\x85\u2028\U000e0001\U0010fffd",
    "CamelCase snake_case kebab-case https://example.org/a?b=c#d 1234567890 I'LL",
    "▁ ▁▁ Ġ <0x41> <s> </s> <unk> <|im_start|>user",
)
"""Texts to compare: scripts, spaces, numbers, contractions, compositions, and look-alikes of tokens."""

PROBED_ADDED_TOKENS = 256
"""Number of added tokens that are probed alone, between words and side by side."""


BYTE_TOKEN = "<0x"
"""Beginning of single bytes' tokens. No merge makes one, but fastokens (0.3.5) makes one of a text `<0x41>`.
"""

WORDS_AT_ONCE = 4096


class QuickEncoder:
    """A quick encoder. It is safe to share between threads, and gives up the GIL while it works."""

    def __init__(self, encoder: Any, *, avoids: str = "") -> None:
        self._encoder, self._avoids = encoder, avoids

    def ids(self, text: str, *, with_special: bool) -> tuple[int, ...] | None:
        """Return the ids. None: the encoder does not handle this text, or gave up on it, as at a regular
        expression that backtracks far."""
        if self._avoids and self._avoids in text:
            return None
        try:
            return tuple(self._encoder.encode(text, add_special_tokens=with_special).ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # A panic in Rust is not an Exception, and must not end the router.
            return None


def quick_encoder(
    rust: Any, tokenizer_json: str, *, is_tested: bool = False
) -> tuple[QuickEncoder | None, str]:
    """Return a quick encoder that agrees with `rust`, a `tokenizers.Tokenizer` that writes itself as
    `tokenizer_json`; or None and the reason why there is none. `is_tested`: these two were seen to agree."""
    parts = parts_of(tokenizer_json)
    if reason := _unsuitable(parts):
        return None, reason
    try:
        native = fastokens.Tokenizer.from_json_str(tokenizer_json)
    except Exception as error:  # A foreign file may make it raise anything.
        return None, f"fastokens cannot read it: {error}"
    encoder = QuickEncoder(native, avoids=BYTE_TOKEN if parts.model.byte_fallback else "")
    for text in () if is_tested else chain(_probes(parts), _words(rust, encoder)):
        for with_special in (True, False):
            found = encoder.ids(text, with_special=with_special)
            if found is not None and found != tuple(rust.encode(text, add_special_tokens=with_special).ids):
                return None, f"fastokens encodes {text!r:.60} otherwise"
    return encoder, ""


def _unsuitable(parts: TokenizerParts) -> str:
    if parts.model.type != "BPE":
        return "it is no byte-pair encoding"
    if parts.model.dropout:
        return "its merges drop out by chance"
    # The two differ (0.3.5) on such a token right after another added one.
    if any(token.get("single_word") for token in parts.added_tokens or ()):
        return "it has added tokens that match whole words only"
    return ""


def _probes(parts: TokenizerParts) -> Iterator[str]:
    yield from PROBES
    yield "".join(PROBES)
    last = ""
    for token in (parts.added_tokens or [])[-PROBED_ADDED_TOKENS:]:
        content: str = token["content"]
        yield content
        yield f"one {content} two{content}{last} three  {content}\n{content.upper()}{content[:-1]}"
        last = content


def _words(rust: Any, encoder: QuickEncoder) -> Iterator[str]:
    """Return texts of the vocabulary's words, as far as the two encoders may differ in them. A text has many
    words, since each 60,000 cost a second."""
    size: int = rust.get_vocab_size(with_added_tokens=True)
    for first in range(0, size, WORDS_AT_ONCE):
        some = range(first, min(first + WORDS_AT_ONCE, size))
        said: list[str] = rust.decode_batch([[i] for i in some], skip_special_tokens=False)
        words = list({*said, *(word for i in some if (word := rust.id_to_token(i)) is not None)})
        expected = rust.encode_batch_fast(words, add_special_tokens=False)
        for word, encoding in zip(words, expected, strict=True):
            if encoder.ids(word, with_special=False) not in (None, tuple(encoding.ids)):
                yield word
