"""Arrays whose items must differ (`uniqueItems`), enforced while the text comes.

No grammar can say that items differ. So a scanner follows the JSON of the text and knows the items of every
such array, and the grammar's mask loses the tokens that would end an item that is there already, or after
which nothing but such an item could come. The second is found by trying: where the text of an item may still
become an earlier one, the grammar is asked for characters that lead away from it. So a mask is never empty
for this reason. Items are compared as JSON schema compares them: 1 and 1.0 are equal, and so are objects
whose properties come in another order.
"""

import json
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from baton.core.sampling import Grammar, GrammarKind
from engine.sampling.constraints import Matcher
from engine.sampling.masks import Mask, mask_of
from engine.structured.grammars import check_grammar
from engine.structured.unique import Places, SchemaMap

TRIES_MAX = 400
"""Characters that are tried to find out whether another item can come. Beyond it the token is left out."""
_SPACE = b" \t\r\n"
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_BYTES = frozenset(b"+-.0123456789eE")
_MANY_ITEMS = re.compile(rb"\[.*,", re.DOTALL)


class _At(Enum):
    """What the scanner reads."""

    OUTSIDE = auto()
    BETWEEN = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    WORD = auto()


class _Item(NamedTuple):
    """An item that is there, with those before it."""

    before: "_Item | None"
    count: int
    text: bytes
    value: str


class _Items:
    """The items of one array: in order, sorted, and by value. Many scans share them. Each names its own last
    item, and `at` leads there from whatever another scan has left."""

    __slots__ = ("order", "texts", "values")

    def __init__(self) -> None:
        self.order: list[_Item] = []
        self.texts: list[bytes] = []
        self.values: set[str] = set()

    def at(self, last: _Item | None) -> "_Items":
        missing: list[_Item] = []
        while last is not None and not self._has_item(last):
            missing.append(last)
            last = last.before
        self._cut(0 if last is None else last.count)
        for one in reversed(missing):
            self.order.append(one)
            insort(self.texts, one.text)
            self.values.add(one.value)
        return self

    def _has_item(self, item: _Item) -> bool:
        return item.count <= len(self.order) and self.order[item.count - 1] is item

    def _cut(self, count: int) -> None:
        while len(self.order) > count:
            gone = self.order.pop()
            del self.texts[bisect_left(self.texts, gone.text)]
            self.values.discard(gone.value)

    def has(self, begun: bytes) -> bool:
        """Whether a text begins so."""
        at = bisect_left(self.texts, begun)
        return at < len(self.texts) and self.texts[at].startswith(begun)

    def has_text(self, text: bytes) -> bool:
        at = bisect_left(self.texts, text)
        return at < len(self.texts) and self.texts[at] == text

    def beginning(self, begun: bytes) -> Iterable[bytes]:
        for at in range(bisect_left(self.texts, begun), len(self.texts)):
            if not self.texts[at].startswith(begun):
                return
            yield self.texts[at]


class _Container(NamedTuple):
    """An object or array that is open."""

    is_object: bool
    places: Places
    is_unique: bool = False
    is_key_next: bool = False
    key: str = ""
    place: int = 0
    start: int = -1
    """Where the item begins in `_Scan.text` that is under way, or owed after a comma; -1: there is none."""
    items: _Items | None = None
    last: _Item | None = None


class _Scan(NamedTuple):
    """Where the scanner stands in a text."""

    at: _At = _At.OUTSIDE
    stack: tuple[_Container, ...] = ()
    word: bytes = b""
    """The scalar under way; outside of JSON, the last bytes."""
    text: bytes = b""
    """The JSON without white space, with numbers in one spelling each."""
    places: Places = ()
    """What the JSON that comes next is made of."""

    @property
    def is_watched(self) -> bool:
        return any(one.is_unique for one in self.stack)


class ItemScanner:
    """Follows texts of one schema, or of one structural tag, whose `begin` texts name the schema that holds
    after them."""

    def __init__(self, maps: Sequence[tuple[bytes, SchemaMap]]) -> None:
        """`maps` are pairs of the text before and the schema after it; an empty text means the very start."""
        self._maps = maps
        self._tail = max((len(begin) for begin, _ in maps), default=0)
        self._owner: dict[int, SchemaMap] = {}

    def start(self) -> _Scan:
        return _Scan(places=self._begun(b""))

    def feed(self, scan: _Scan, data: bytes) -> _Scan | None:
        """Return where the scanner stands after `data`; None: an item is there already."""
        found: _Scan | None = scan
        for byte in data:
            found = self._fed(found, byte)
            if found is None:
                return None
        return found

    def _begun(self, tail: bytes) -> Places:
        places: list[Any] = []
        for begin, schemas in self._maps:
            if tail.endswith(begin) if begin else not tail:
                for place in schemas.root:
                    self._owner[id(place)] = schemas
                    places.append(place)
        return tuple(places)

    def _fed(self, scan: _Scan, byte: int) -> _Scan | None:
        match scan.at:
            case _At.OUTSIDE:
                return self._outside(scan, byte)
            case _At.STRING:
                top = scan.stack[-1]
                is_kept = scan.is_watched or (top.is_object and top.is_key_next)
                word = scan.word + bytes((byte,)) if is_kept else b'"'
                if byte == 0x22:
                    return self._scalar_ended(scan._replace(word=word))
                return scan._replace(word=word, at=_At.ESCAPE if byte == 0x5C else _At.STRING)
            case _At.ESCAPE:
                top = scan.stack[-1]
                is_kept = scan.is_watched or (top.is_object and top.is_key_next)
                return scan._replace(word=scan.word + bytes((byte,)) if is_kept else b'"', at=_At.STRING)
            case _At.NUMBER | _At.WORD:
                if byte in _NUMBER_BYTES or 0x61 <= byte <= 0x7A:
                    return scan._replace(word=scan.word + bytes((byte,)))
                ended = self._scalar_ended(scan)
                return None if ended is None else self._between(ended, byte)
            case _At.BETWEEN:
                return self._between(scan, byte)

    def _outside(self, scan: _Scan, byte: int) -> _Scan:
        if scan.places and byte in b"{[":
            opened = scan._replace(at=_At.BETWEEN, word=b"", text=b"")
            return self._opened(opened, byte, scan.places)
        if scan.places and byte in _SPACE:
            return scan
        tail = (scan.word + bytes((byte,)))[-self._tail :] if self._tail else b"-"
        return scan._replace(word=tail, places=self._begun(tail))

    def _between(self, scan: _Scan, byte: int) -> _Scan | None:
        if byte in _SPACE:
            return scan
        top = scan.stack[-1]
        one = bytes((byte,))
        match one:
            case b"{" | b"[":
                return self._opened(scan, byte, self._places_next(top))
            case b"}" | b"]":
                closed = scan._replace(stack=scan.stack[:-1])
                return self._value_ended(closed._replace(text=_kept(closed, one)))
            case b",":
                start = len(scan.text) + 1 if top.is_unique else -1
                top = top._replace(is_key_next=top.is_object, place=top.place + 1, start=start)
                return scan._replace(stack=(*scan.stack[:-1], top), text=_kept(scan, one))
            case b":":
                return scan._replace(text=_kept(scan, one))
            case b'"':
                return scan._replace(at=_At.STRING, word=one)
            case _:
                return scan._replace(at=_At.NUMBER if byte in b"-0123456789" else _At.WORD, word=one)

    def _opened(self, scan: _Scan, byte: int, places: Places) -> _Scan:
        is_object = byte == 0x7B
        is_unique = not is_object and SchemaMap.is_unique(places)
        start = len(scan.text) + 1 if is_unique else -1
        items = _Items() if is_unique else None
        container = _Container(is_object, places, is_unique, is_key_next=is_object, start=start, items=items)
        opened = scan._replace(stack=(*scan.stack, container))
        return opened._replace(text=_kept(opened, bytes((byte,))))

    def _places_next(self, top: _Container) -> Places:
        found: list[Any] = []
        for place in top.places:
            schemas = self._owner[id(place)]
            inner = (
                schemas.property((place,), top.key) if top.is_object else schemas.item((place,), top.place)
            )
            for one in inner:
                self._owner[id(one)] = schemas
                found.append(one)
        return tuple(found)

    def _scalar_ended(self, scan: _Scan) -> _Scan | None:
        word = _in_one_spelling(scan.word) if scan.at is _At.NUMBER else scan.word
        ended = scan._replace(at=_At.BETWEEN, word=b"", text=_kept(scan, word))
        top = scan.stack[-1]
        if top.is_object and top.is_key_next:
            top = top._replace(is_key_next=False, key=str(_value(word)))
            return ended._replace(stack=(*scan.stack[:-1], top))
        return self._value_ended(ended)

    def _value_ended(self, scan: _Scan) -> _Scan | None:
        if not scan.stack:
            return scan._replace(at=_At.OUTSIDE, word=b"-", text=b"", places=())
        top = scan.stack[-1]
        if not top.is_unique:
            return scan
        text = scan.text[top.start :]
        value = _identity(text)
        assert top.items is not None
        if value in top.items.at(top.last).values:
            return None
        count = 1 if top.last is None else top.last.count + 1
        top = top._replace(start=-1, last=_Item(top.last, count, text, value))
        return scan._replace(stack=(*scan.stack[:-1], top))


def _kept(scan: _Scan, more: bytes) -> bytes:
    """The text with more of it, as far as anybody compares it."""
    return scan.text + more if scan.is_watched else b""


def may_repeat(scan: _Scan) -> bool:
    """Whether an item that is under way may become one that is there already."""
    return any(
        _may_become(scan.text[one.start :], scan, one.items.at(one.last))
        for one in scan.stack
        if one.items is not None and one.start >= 0
    )


def _may_become(begun: bytes, scan: _Scan, items: _Items) -> bool:
    if scan.at is not _At.NUMBER or items.has(begun + scan.word):
        return items.has(begun + scan.word)
    if _NUMBER.fullmatch(scan.word) is None:
        return any(items.has(begun + bytes((byte,))) for byte in b"-0123456789")
    same = begun + _in_one_spelling(scan.word)
    return any(items.has(same + after) for after in (b",", b"]", b"}")) or items.has_text(same)


def _in_one_spelling(number: bytes) -> bytes:
    """The same bytes for equal numbers."""
    try:
        value = json.loads(number)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return b"0" if value == 0 else str(value).encode()
    except (ValueError, OverflowError):  # thousands of digits, or not a whole number yet
        return number


def _value(text: bytes) -> Any:
    """The JSON value. What is no text in UTF-8 is compared as it will be decoded."""
    decoded = text.decode(errors="replace")
    try:
        return json.loads(decoded)
    except ValueError:  # a number of thousands of digits
        return decoded


def _identity(text: bytes) -> str:
    return json.dumps(_value(text), sort_keys=True)


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
        self.single = {byte: self.of[bytes((byte,))][0] for byte in range(256) if bytes((byte,)) in self.of}


class UniqueItemsMatcher:
    """A matcher whose arrays have no equal items where the schema says so. Implements
    `engine.sampling.constraints.Matcher`."""

    def __init__(self, matcher: Matcher, scanner: ItemScanner, tokens: TokenBytes) -> None:
        self._matcher, self._scanner, self._tokens = matcher, scanner, tokens
        self._scans = [scanner.start()]

    def accept(self, token: int) -> bool:
        scan = self._scanner.feed(self._scans[-1], self._tokens.words[token])
        if scan is None or not self._matcher.accept(token):
            return False
        self._scans.append(scan)
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        if count:
            del self._scans[-count:]

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)
        scan = self._scans[-1]
        for token in self._doubtful(scan, mask):
            if not self._is_open(scan, token):
                mask[token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))

    def _doubtful(self, scan: _Scan, mask: Mask) -> list[int]:
        """The allowed tokens that may end or begin an item that is there already."""
        if not scan.is_watched:
            return _tokens_of(mask & self._tokens.several)
        if scan.at not in (_At.STRING, _At.ESCAPE):
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

    def _is_open(self, scan: _Scan, token: int) -> bool:
        """Whether the text can go on after the token."""
        after = self._scanner.feed(scan, self._tokens.words[token])
        if after is None:
            return False
        if after is scan or not may_repeat(after):
            return True
        if not self._matcher.accept(token):
            return False
        found = self._leads_away(after, [TRIES_MAX])
        self._matcher.rollback(1)
        return found

    def _leads_away(self, scan: _Scan, tries: list[int]) -> bool:
        """Whether characters that the grammar allows make of the item under way one that is not there."""
        if not may_repeat(scan):
            return True
        mask = mask_of((), len(self._tokens.words))
        self._matcher.fill(mask)
        further: list[tuple[int, _Scan]] = []
        for byte, token in self._tokens.single.items():
            if not mask[token >> 5] >> (token & 31) & 1 or (byte in _SPACE and scan.at is not _At.STRING):
                continue
            after = self._scanner.feed(scan, bytes((byte,)))
            if after is not None and not may_repeat(after):
                return True
            if after is not None:
                further.append((token, after))
        for token, after in further:
            tries[0] -= 1
            if tries[0] < 0:
                return False
            if self._matcher.accept(token):
                found = self._leads_away(after, tries)
                self._matcher.rollback(1)
                if found:
                    return True
        return False


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
        maps = list(_tags(checked))
        return ItemScanner(maps) if any(one.has_unique_arrays(one.all) for _, one in maps) else None
    return None


def _tags(node: Any) -> Iterable[tuple[bytes, SchemaMap]]:
    if isinstance(node, list):
        for one in node:
            yield from _tags(one)
    elif isinstance(node, dict):
        content = node.get("content")
        if node.get("type") == "tag" and isinstance(content, dict) and "json_schema" in content:
            yield str(node["begin"]).encode(), SchemaMap(content["json_schema"])
        else:
            for value in node.values():
                yield from _tags(value)
