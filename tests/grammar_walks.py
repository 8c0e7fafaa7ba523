"""Random texts of a compiled grammar, from a vocabulary of single bytes."""

import random

from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from baton.core.sampling import Grammar
from engine.grammar_compile import TextMatcher, compile_grammar
from engine.sampling.masks import mask_of
from engine.unique_items import TokenBytes, UniqueItemsMatcher, scanner_of

END = 256
LIKELY = frozenset(b'abx-09."\\u{},:[]')
"""Bytes that come up often, so that names meet and escapes are tried."""
CLOSING = frozenset(b'"}]')
OPENING = frozenset(b"[{-\\")


class Walker:
    """Compiles as a worker does, and walks through what the compiled grammar allows."""

    def __init__(self) -> None:
        words = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        info = TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[END])
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._tokens = TokenBytes(words)
        self._mask = mask_of((), len(words))

    def compile(self, grammar: Grammar):
        """Compile what the worker takes. Raises GrammarError for what it refuses."""
        return compile_grammar(self._compiler, grammar), scanner_of(grammar)

    def matcher(self, compiled):
        """Return what follows a text, as a worker's sequence has it."""
        grammar, scanner = compiled
        matcher = TextMatcher(GrammarMatcher(grammar))
        return matcher if scanner is None else UniqueItemsMatcher(matcher, scanner, self._tokens)

    def accepts(self, compiled, text: str) -> bool:
        matcher = self.matcher(compiled)
        return all(matcher.accept(byte) for byte in text.encode()) and END in self.allowed(matcher)

    def allowed(self, matcher) -> list[int]:
        matcher.fill(self._mask)
        bits = self._mask.view("uint32")
        return [token for token in range(257) if bits[token // 32] >> (token % 32) & 1]

    def walk(self, compiled, seed: int, *, patience: int = 60, bytes_max: int = 4000) -> str:
        """Return one text. After `patience` bytes it takes the way out wherever there is one."""
        rng = random.Random(seed)
        matcher = self.matcher(compiled)
        text = bytearray()
        while len(text) < bytes_max:
            token = self._next(matcher, rng, is_leaving=len(text) > patience)
            if token == END:
                return text.decode()
            assert matcher.accept(token)
            text.append(token)
        raise AssertionError(f"no end: {bytes(text[:200])!r}")

    def _next(self, matcher, rng: random.Random, *, is_leaving: bool) -> int:
        allowed = self.allowed(matcher)
        assert allowed, "the grammar leads nowhere"
        # White space is dull. After 0xED xgrammar allows halves of surrogate pairs, which no UTF-8 text has.
        dull = [token for token in allowed if token > 0x20 and token != 0xED]
        if END in allowed and (is_leaving or rng.random() < 0.3):
            return END
        if is_leaving and (closing := [token for token in dull if token in CLOSING]):
            return rng.choice(closing)
        if is_leaving and ord(",") in allowed:
            return ord(",")
        if is_leaving:
            return rng.choice([token for token in dull if token not in OPENING] or allowed)
        if (likely := [token for token in dull if token in LIKELY]) and rng.random() < 0.7:
            return rng.choice(likely)
        return rng.choice(dull or allowed)
