"""What the generated mapping calls while it reads a message: checks that a correct peer's message passes."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TypeVar

from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E", bound=StrEnum)


class WireError(Exception):
    """The peer sent something that no version of the protocol allows."""


def enum_member(members: Mapping[int, A], number: int) -> A:
    try:
        return members[number]
    except KeyError:
        known = [str(member) for member in members.values()]
        raise WireError(f"enum value {number} is not one of {known}") from None


def enum_named(enum: type[E], value: str) -> E:
    try:
        return enum(value)
    except ValueError as error:
        raise WireError(str(error)) from None


def block_hash(raw: bytes) -> BlockHash:
    if len(raw) != HASH_BYTES:
        raise WireError(f"a block hash has {HASH_BYTES} bytes, this one {len(raw)}")
    return BlockHash(raw)


def block_hashes(raw: bytes) -> tuple[BlockHash, ...]:
    """The hashes that travel one behind the other in `raw`."""
    if len(raw) % HASH_BYTES:
        raise WireError(f"block hashes have {HASH_BYTES} bytes each, these together {len(raw)}")
    return tuple([BlockHash(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES)])


def pairs(what: str, first: Collection[A], second: Collection[B]) -> tuple[tuple[A, B], ...]:
    """Two columns as pairs. `what` names the field in the error."""
    if len(first) != len(second):
        raise WireError(f"{what}: columns of {len(first)} and {len(second)} elements")
    return tuple(zip(first, second, strict=True))
