"""Field numbers that stay: they are read from the .proto file that is committed, and only ever added to.

A field that is gone leaves a `reserved` line behind, so that its number never gets another meaning.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.wire.generate.kinds import DeclarationError

_BLOCK = re.compile(r"^(?:message|enum) (\w+) \{")
_FIELD = re.compile(r"^\s+(?:(?P<type>[\w<>, ]+) )?(?P<name>\w+) = (?P<number>\d+);$")
_RESERVED = re.compile(r"^\s+reserved (\d+);  // was (\w+)$")


@dataclass(slots=True)
class Block:
    """What is known of one message or enum of the committed file."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])
    types: dict[str, str] = field(default_factory=dict[str, str])
    """Label and type of each field; empty for values of enums."""
    reserved: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True)
class Numbered:
    numbers: Mapping[str, int]
    reserved: Mapping[int, str]


def read_blocks(proto: str) -> dict[str, Block]:
    """Messages and enums of a file that this generator wrote, by name."""
    blocks: dict[str, Block] = {}
    block = Block()
    for line in proto.splitlines():
        if found := _BLOCK.match(line):
            block = blocks[found[1]] = Block()
        elif found := _RESERVED.match(line):
            block.reserved[int(found[1])] = found[2]
        elif found := _FIELD.match(line):
            block.numbers[found["name"]] = int(found["number"])
            block.types[found["name"]] = found["type"] or ""
    return blocks


def numbered(name: str, fields: Sequence[tuple[str, str]], known: Block | None) -> Numbered:
    """A number for each of `fields`, which are (label and type, name).

    Raises DeclarationError for a field that changed its type: readers of the old one would misread it.
    """
    known = known or Block()
    numbers: dict[str, int] = {}
    following = max([0, *known.numbers.values(), *known.reserved]) + 1
    for of_type, each in fields:
        before = known.types.get(each, of_type)
        if before != of_type:
            raise DeclarationError(
                f"{name}.{each} was {before} and is {of_type} now: give the new field another name, or "
                "change its line in baton.proto and raise WIRE_VERSION"
            )
        if each in known.numbers:
            numbers[each] = known.numbers[each]
        else:
            numbers[each], following = following, following + 1
    gone = {number: each for each, number in known.numbers.items() if each not in numbers and number}
    return Numbered(numbers, dict(sorted({**known.reserved, **gone}.items())))
