"""Annotations that say how a value of a message travels, where its Python type alone does not.

A plain `int` is a `uint32` on the wire and a plain `float` is a `double`. Values of the annotated types are
ordinary ints, floats and tuples: only the generator of the wire's code, `baton.wire.generate`, reads the
marks.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

ScalarName = Literal["uint32", "uint64", "sint32", "sint64", "fixed64", "float", "double"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """The protobuf type of a number."""

    name: ScalarName


@dataclass(frozen=True, slots=True)
class Columns:
    """Pairs travel as two lists, whose names are the field's name and these suffixes.

    An empty suffix leaves the field's name as it is.
    """

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class OneFor:
    """The list has one element for each element of the field that is named here; the decoder checks it."""

    field: str


UInt64 = Annotated[int, Scalar("uint64")]
SInt32 = Annotated[int, Scalar("sint32")]
"""A number that may be negative."""
SInt64 = Annotated[int, Scalar("sint64")]
Fixed64 = Annotated[int, Scalar("fixed64")]
"""Eight bytes whatever the value: for checksums, whose values are spread evenly."""
Float32 = Annotated[float, Scalar("float")]
"""Half the bytes of a float, for vectors that were computed in float32 anyway."""
