"""Follows JSON text and knows the items of arrays whose items must differ (`uniqueItems`).

Items are compared as JSON schema compares them: 1 and 1.0 are equal, and so are objects whose properties come
in another order.
"""

import json
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from engine.structured.unique import Places, SchemaMap

_SPACE = b" \t\r\n"
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_BYTES = frozenset(b"+-.0123456789eE")
_ZERO = re.compile(rb"-?0(?:\.0*)?[eE]")


class At(Enum):
    """What the scanner reads."""

    OUTSIDE = auto()
    BETWEEN = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    WORD = auto()


class Item:
    """An item that is there, with those before it. Two are never equal."""

    __slots__ = ("before", "count", "text", "value")

    def __init__(self, before: "Item | None", count: int, text: bytes, value: str) -> None:
        self.before, self.count, self.text, self.value = before, count, text, value


class Items:
    """The items of one array: in order, sorted, and by value. Many scans share them. Each names its own last
    item, and `at` leads there from whatever another scan has left."""

    __slots__ = ("order", "texts", "values")

    def __init__(self) -> None:
        self.order: list[Item] = []
        self.texts: list[bytes] = []
        self.values: set[str] = set()

    def at(self, last: Item | None) -> "Items":
        missing: list[Item] = []
        while last is not None and not self.has_item(last):
            missing.append(last)
            last = last.before
        self._cut(0 if last is None else last.count)
        for one in reversed(missing):
            self.order.append(one)
            insort(self.texts, one.text)
            self.values.add(one.value)
        return self

    def has_item(self, item: Item) -> bool:
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


class Container(NamedTuple):
    """An object or array that is open."""

    is_object: bool
    places: Places
    is_unique: bool = False
    is_key_next: bool = False
    key: str = ""
    place: int = 0
    start: int = -1
    """Where the item begins in `Scan.text` that is under way, or owed after a comma; -1: there is none."""
    items: Items | None = None
    last: Item | None = None


class Scan(NamedTuple):
    """Where the scanner stands in a text."""

    at: At = At.OUTSIDE
    stack: tuple[Container, ...] = ()
    word: bytes = b""
    """The scalar under way; outside of JSON, the last bytes."""
    text: bytes = b""
    """The outermost item that must differ: JSON without white space, with numbers in one spelling each."""
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
        self._least: dict[int, float] = {}

    def start(self) -> Scan:
        return Scan(places=self._begun(b""))

    def feed(self, scan: Scan, data: bytes) -> Scan | None:
        """Return where the scanner stands after `data`; None: an item is there already."""
        found: Scan | None = scan
        for byte in data:
            found = self._fed(found, byte)
            if found is None:
                return None
        return found

    def has_more_items(self, scan: Scan) -> bool:
        """Whether an item begins, of which the schema has surely more values than are there."""
        top = scan.stack[-1] if scan.stack else None
        if scan.at is not At.BETWEEN or top is None or top.start != len(scan.text):
            return False
        if any(one.is_unique for one in scan.stack[:-1]):
            return False
        count = 0 if top.last is None else top.last.count
        return all(self._least_items(place) > count for place in top.places if place.get("uniqueItems"))

    def _least_items(self, place: Any) -> float:
        if id(place) not in self._least:
            self._least[id(place)] = self._owner[id(place)].least(place.get("items", True))
        return self._least[id(place)]

    def _begun(self, tail: bytes) -> Places:
        places: list[Any] = []
        for begin, schemas in self._maps:
            if tail.endswith(begin) if begin else not tail:
                for place in schemas.root:
                    self._owner[id(place)] = schemas
                    places.append(place)
        return tuple(places)

    def _fed(self, scan: Scan, byte: int) -> Scan | None:
        match scan.at:
            case At.OUTSIDE:
                return self._outside(scan, byte)
            case At.STRING:
                top = scan.stack[-1]
                is_kept = scan.is_watched or (top.is_object and top.is_key_next)
                word = scan.word + bytes((byte,)) if is_kept else b'"'
                if byte == 0x22:
                    return self._scalar_ended(scan._replace(word=word))
                return scan._replace(word=word, at=At.ESCAPE if byte == 0x5C else At.STRING)
            case At.ESCAPE:
                top = scan.stack[-1]
                is_kept = scan.is_watched or (top.is_object and top.is_key_next)
                return scan._replace(word=scan.word + bytes((byte,)) if is_kept else b'"', at=At.STRING)
            case At.NUMBER | At.WORD:
                if byte in _NUMBER_BYTES or 0x61 <= byte <= 0x7A:
                    if not scan.is_watched:
                        return scan
                    return scan._replace(word=scan.word + bytes((byte,)))
                ended = self._scalar_ended(scan)
                return None if ended is None else self._between(ended, byte)
            case At.BETWEEN:
                return self._between(scan, byte)

    def _outside(self, scan: Scan, byte: int) -> Scan:
        if scan.places and byte in b"{[":
            opened = scan._replace(at=At.BETWEEN, word=b"", text=b"")
            return self._opened(opened, byte, scan.places)
        if scan.places and byte in _SPACE:
            return scan
        tail = (scan.word + bytes((byte,)))[-self._tail :] if self._tail else b"-"
        return scan._replace(word=tail, places=self._begun(tail))

    def _between(self, scan: Scan, byte: int) -> Scan | None:
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
                text = _kept(scan, one)
                if top.is_unique and not any(outer.is_unique for outer in scan.stack[:-1]):
                    text = b""
                start = len(text) if top.is_unique else -1
                top = top._replace(is_key_next=top.is_object, place=top.place + 1, start=start)
                return scan._replace(stack=(*scan.stack[:-1], top), text=text)
            case b":":
                return scan._replace(text=_kept(scan, one))
            case b'"':
                return scan._replace(at=At.STRING, word=one)
            case _:
                return scan._replace(at=At.NUMBER if byte in b"-0123456789" else At.WORD, word=one)

    def _opened(self, scan: Scan, byte: int, places: Places) -> Scan:
        is_object = byte == 0x7B
        is_unique = not is_object and SchemaMap.is_unique(places)
        text = _kept(scan, bytes((byte,)))
        start = len(text) if is_unique else -1
        items = Items() if is_unique else None
        container = Container(is_object, places, is_unique, is_key_next=is_object, start=start, items=items)
        return scan._replace(stack=(*scan.stack, container), text=text)

    def _places_next(self, top: Container) -> Places:
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

    def _scalar_ended(self, scan: Scan) -> Scan | None:
        word = _in_one_spelling(scan.word) if scan.at is At.NUMBER else scan.word
        ended = scan._replace(at=At.BETWEEN, word=b"", text=_kept(scan, word))
        top = scan.stack[-1]
        if top.is_object and top.is_key_next:
            top = top._replace(is_key_next=False, key=str(_value(word)))
            return ended._replace(stack=(*scan.stack[:-1], top))
        return self._value_ended(ended)

    def _value_ended(self, scan: Scan) -> Scan | None:
        if not scan.stack:
            return scan._replace(at=At.OUTSIDE, word=b"-", text=b"", places=())
        top = scan.stack[-1]
        if not top.is_unique:
            return scan
        text = scan.text[top.start :]
        value = _identity(text)
        assert top.items is not None
        if value in top.items.at(top.last).values:
            return None
        count = 1 if top.last is None else top.last.count + 1
        top = top._replace(start=-1, last=Item(top.last, count, text, value))
        return scan._replace(stack=(*scan.stack[:-1], top))


def _kept(scan: Scan, more: bytes) -> bytes:
    """The text with more of it, as far as anybody compares it."""
    return scan.text + more if scan.is_watched else b""


def may_repeat(scan: Scan) -> bool:
    """Whether an item that is under way may become one that is there already."""
    return any(
        _may_become(scan.text[one.start :], scan, one.items.at(one.last))
        for one in scan.stack
        if one.items is not None and one.start >= 0
    )


def _may_become(begun: bytes, scan: Scan, items: Items) -> bool:
    if scan.at is not At.NUMBER or items.has(begun + scan.word):
        return items.has(begun + scan.word)
    if _NUMBER.fullmatch(scan.word) is None:
        return any(items.has(begun + bytes((byte,))) for byte in b"-0123456789")
    same = begun + _in_one_spelling(scan.word)
    return any(items.has(same + after) for after in (b",", b"]", b"}")) or items.has_text(same)


def _in_one_spelling(number: bytes) -> bytes:
    """The same bytes for equal numbers, and those that xgrammar (0.2.8) writes for a listed number."""
    try:
        value = json.loads(number)
    except ValueError:  # thousands of digits, or not a whole number yet
        return number
    if value == 0:
        return b"0"
    text = str(value) if isinstance(value, int) else f"{value:.17g}"
    return text.encode() if text.lstrip("-") != "inf" else number


def _value(text: bytes) -> Any:
    """The JSON value. What is no text in UTF-8 is compared as it will be decoded."""
    decoded = text.decode(errors="replace")
    try:
        return json.loads(decoded, parse_float=_number)
    except ValueError:  # a number of thousands of digits
        return decoded


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _identity(text: bytes) -> str:
    return json.dumps(_value(text), sort_keys=True)


def is_zero_for_ever(scan: Scan) -> bool:
    """Whether a number is under way that no exponent makes another than zero."""
    return scan.at is At.NUMBER and _ZERO.match(scan.word) is not None
