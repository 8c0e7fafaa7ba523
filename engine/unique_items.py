"""Arrays whose items must differ (`uniqueItems`), enforced while the text comes.

No grammar can say that items differ. So a scanner (`engine.unique_scan`) follows the JSON of the text and
knows the items of every such array, and the grammar's mask loses the tokens that would end an item that is
there already, or after which nothing but such an item could come. The second is found by trying: where the
text of an item may still become an earlier one, the grammar is asked for characters that lead away from it.
"""

import re
import time
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from baton.core.sampling import Grammar, GrammarKind
from engine.grammar_compile import TOKEN_S_MAX
from engine.sampling.constraints import Matcher
from engine.sampling.masks import Mask, mask_of
from engine.structured.grammars import check_grammar
from engine.structured.unique import SchemaMap
from engine.structured.unique_places import tags_of
from engine.unique_scan import At, Item, ItemScanner, Scan, is_zero_for_ever, may_repeat

KNOWN_MAX = 4096
"""Beginnings of items whose ways out are remembered."""
KNOWN_BYTES_MAX = 1024
"""Longer beginnings are not remembered."""
STEP_S_MAX = 0.01
"""More than a step of a look takes by itself."""
SCANS_KEPT = 64
"""Last tokens to each of which there is a scan. Of those before, each of so many has one: a scan may hold a
long item, and whoever takes back more than draft tokens can wait."""
_MANY_ITEMS = re.compile(rb"\[.*,", re.DOTALL)


class TokenBytes:
    """The bytes of a vocabulary's tokens, and those that need a look. Made once for a model."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self.words = tuple(words)
        self.of: dict[bytes, list[int]] = {}
        for token, word in enumerate(self.words):
            self.of.setdefault(word, []).append(token)
        self.longest = max(map(len, self.words), default=0)
        size = len(self.words)
        self.quotes = mask_of([t for t, word in enumerate(self.words) if b'"' in word], size)
        """Tokens that may end a string."""
        self.several = mask_of([t for t, word in enumerate(self.words) if _MANY_ITEMS.search(word)], size)
        """Tokens that open an array and go on behind its first item."""
        single = [self.of[bytes((byte,))][0] for byte in range(256) if bytes((byte,)) in self.of]
        self.single_tokens = np.array(single, dtype=np.int64)
        """Tokens of one byte, one for each."""


class UniqueItemsMatcher:
    """A matcher whose arrays have no equal items where the schema says so. Implements
    `engine.sampling.constraints.Matcher`."""

    def __init__(self, matcher: Matcher, scanner: ItemScanner, tokens: TokenBytes) -> None:
        self._matcher, self._scanner, self._tokens = matcher, scanner, tokens
        self._scans: list[Scan | None] = [scanner.start()]
        """After each token, as far as they are kept."""
        self._taken: list[int] = []
        self._ways = _WaysOut(matcher, scanner, tokens)
        self._is_slow = False

    @property
    def scan(self) -> Scan:
        found = self._scans[-1]
        assert found is not None
        return found

    def accept(self, token: int) -> bool:
        if self._is_slow:
            return False
        scan = self._scanner.feed(self.scan, self._tokens.words[token])
        if scan is None or not self._matcher.accept(token):
            return False
        self._scans.append(scan)
        self._taken.append(token)
        old = len(self._taken) - SCANS_KEPT
        if old > 0 and old % SCANS_KEPT:
            self._scans[old] = None
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        if count:
            del self._scans[-count:], self._taken[-count:]
            self._scan_again()

    def _scan_again(self) -> None:
        at = len(self._taken)
        while (scan := self._scans[at]) is None:
            at -= 1
        for number, token in enumerate(self._taken[at:], at + 1):
            scan = self._scanner.feed(scan, self._tokens.words[token])
            assert scan is not None
            self._scans[number] = scan

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)
        clock = _Clock()
        scan = self.scan
        for token in self._doubtful(scan, mask):
            if clock.is_late() or not self._is_open(scan, token, clock):
                mask[token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        self._is_slow |= clock.is_late()

    def _doubtful(self, scan: Scan, mask: Mask) -> list[int]:
        """The allowed tokens that may end or begin an item that is there already."""
        if not scan.is_watched:
            return _tokens_of(mask & self._tokens.several)
        if scan.at not in (At.STRING, At.ESCAPE):
            return _tokens_of(mask)
        found = set(_tokens_of(mask & self._tokens.quotes))
        for one in scan.stack:
            if one.items is None or one.start < 0:
                continue
            begun = scan.text[one.start :] + scan.word
            for text in one.items.at(one.last).beginning(begun):
                rest = text[len(begun) : len(begun) + self._tokens.longest]
                found.update(
                    t for end in range(1, len(rest) + 1) for t in self._tokens.of.get(rest[:end], ())
                )
        return [token for token in found if mask[token >> 5] >> (token & 31) & 1]

    def _is_open(self, scan: Scan, token: int, clock: "_Clock") -> bool:
        """Whether the text can go on after the token."""
        after = self._scanner.feed(scan, self._tokens.words[token])
        if after is None:
            return False
        if after is scan or not may_repeat(after) or self._scanner.has_more_items(after):
            return True
        if is_zero_for_ever(after):
            return False
        known = self._ways.known(after)
        if known is not None or not self._matcher.accept(token):
            return bool(known)
        found = self._ways.find(after, clock)
        self._matcher.rollback(1)
        return found


class _Clock:
    """The time of one look. It is the thread's own, since being held up by others is not the schema's fault,
    and neither is a step that took very long: Python collected its garbage."""

    def __init__(self) -> None:
        self._last_s, self._spent_s = time.thread_time(), 0.0

    def is_late(self) -> bool:
        """Ask after each step."""
        now_s = time.thread_time()
        self._spent_s += min(now_s - self._last_s, STEP_S_MAX)
        self._last_s = now_s
        return self._spent_s > TOKEN_S_MAX


class _WaysOut:
    """Looks for characters that the grammar allows and that make of an item under way one that is not there,
    and remembers where there were some, or none."""

    def __init__(self, matcher: Matcher, scanner: ItemScanner, tokens: TokenBytes) -> None:
        self._matcher, self._scanner, self._tokens = matcher, scanner, tokens
        self._mask = mask_of((), len(tokens.words))
        self._known: dict[Hashable, tuple[Item | None, bool]] = {}

    def known(self, scan: Scan) -> bool | None:
        """Whether there is a way; None: nobody has looked."""
        outer = next(one for one in scan.stack if one.is_unique)
        assert outer.items is not None
        last, is_open = self._known.get((outer.items, scan.at, scan.text, scan.word), (None, None))
        if is_open is None or (is_open and last is outer.last):
            return is_open
        # Where there was none there is none with still more items.
        is_before = last is None or outer.items.at(outer.last).has_item(last)
        return False if not is_open and is_before else None

    def _remember(self, scans: Iterable[Scan], *, is_open: bool) -> None:
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        for scan in scans:
            outer = next(one for one in scan.stack if one.is_unique)
            if len(scan.text) + len(scan.word) <= KNOWN_BYTES_MAX:
                self._known[outer.items, scan.at, scan.text, scan.word] = outer.last, is_open

    def find(self, scan: Scan, clock: "_Clock") -> bool:
        """Whether there is a way from where the matcher stands. What is not found in time is none."""
        scans, further = [scan], [self._further(scan)]
        found = False
        while scans and not found and not clock.is_late():
            ways = further[-1]
            if ways is None:
                found = True
            elif not ways:
                self._remember((scans.pop(),), is_open=False)
                further.pop()
                if scans:
                    self._matcher.rollback(1)
            else:
                token, after = ways.pop()
                known = self.known(after)
                found = known is True
                if known is None and self._matcher.accept(token):
                    scans.append(after)
                    further.append(self._further(after))
        if found:
            self._remember(scans, is_open=True)
        if len(scans) > 1:
            self._matcher.rollback(len(scans) - 1)
        return found

    def _further(self, scan: Scan) -> list[tuple[int, Scan]] | None:
        """The tokens of one character after which the item may still become another, or None: some token
        leads away."""
        self._matcher.fill(self._mask)
        found: list[tuple[int, Scan]] = []
        for token in self._tokens.single_tokens[_allows(self._mask, self._tokens.single_tokens)].tolist():
            byte = self._tokens.words[token]
            if byte in (b" ", b"\t", b"\r", b"\n") and scan.at is not At.STRING:
                continue
            after = self._scanner.feed(scan, byte)
            if after is not None and (not may_repeat(after) or self._scanner.has_more_items(after)):
                return None
            if after is not None and not is_zero_for_ever(after):
                found.append((token, after))
        return found


def _allows(mask: Mask, tokens: Any) -> Any:
    return (mask[tokens >> 5] >> (tokens & 31) & 1).astype(bool)


def _tokens_of(mask: Mask) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def scanner_of(grammar: Grammar) -> ItemScanner | None:
    """The scanner for a grammar that was compiled; None: no array of it must have different items."""
    if "uniqueItems" not in grammar.text:
        return None
    # As the compiler was given it: what arrives is not trusted.
    checked = check_grammar(grammar, grammar.kind)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return ItemScanner([(b"", SchemaMap(checked))]) if SchemaMap.has_unique_arrays(checked) else None
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        maps = [(begin.encode(), SchemaMap(schema)) for begin, schema in tags_of(checked)]
        return ItemScanner(maps) if any(one.has_unique_arrays(one.all) for _, one in maps) else None
    return None
