"""Schemas of Python's classes, as pydantic makes them: each is accepted, and its texts fit it."""

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    create_model,
)
from typing_extensions import TypedDict

from router.openai.response_format import schema_grammar
from tests.grammar_walks import Walker

WALKER = Walker()


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    height: float = 1.0


class Movie(TypedDict, total=False):
    name: str
    year: int


class Pair(NamedTuple):
    first: int
    second: str


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: Literal["a", "b"]
    count: int = 0


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: bool


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: set[str] = Field(default_factory=set)


class Tree(BaseModel):
    value: int
    below: list["Tree"] = Field(default_factory=list, max_length=2)


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES: tuple[Any, ...] = (
    str, int, float, bool, None, Any, Colour, Level, Size, Movie, Pair, Frozen, Closed, Tree, Pet,
    Literal["x", 2, None], datetime.datetime, datetime.date, datetime.time, uuid.UUID,
    AnyUrl, ipaddress.IPv4Address, bytes,
    Annotated[int, Field(ge=1, lt=20)], Annotated[int, Field(multiple_of=5, gt=0, le=50)],
    Annotated[float, Field(gt=0, le=1)], Annotated[str, Field(min_length=1, max_length=4)],
    Annotated[str, Field(pattern=r"^[A-Z]{2}-\d+$")], Annotated[list[int], Field(min_length=1, max_length=3)],
    Annotated[set[int], Field(min_length=2, max_length=4)], Annotated[set[Colour], Field(min_length=2)],
    set[str], frozenset[Frozen], set[Size], set[tuple[int, bool]], frozenset[uuid.UUID], set[Colour],
    dict[str, int], dict[str, Pet], dict[Colour, float], tuple[int, str], tuple[int, ...], list[Movie],
)  # fmt: skip
LOOSE = (decimal.Decimal, Annotated[decimal.Decimal, Field(ge=0, max_digits=5)], datetime.timedelta)
"""Types whose schemas allow texts that pydantic refuses."""


def assert_kept(kind: Any, walks: int, *, is_loose: bool = False) -> None:
    """Every text of the accepted schema is valid, and the class takes it."""
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    found = WALKER.compile(schema_grammar(schema, "s"))
    for seed in range(walks):
        text = WALKER.walk(found, seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        if not is_loose:
            adapter.validate_json(text)


@pytest.mark.parametrize("kind", TYPES, ids=[str(kind)[:60] for kind in TYPES])
def test_a_type_of_a_field(kind):
    assert_kept(kind, 4)


@pytest.mark.parametrize("kind", LOOSE, ids=str)
def test_a_type_whose_schema_says_less_than_the_class(kind):
    assert_kept(kind, 4, is_loose=True)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_class_of_such_fields(data):
    fields: dict[str, Any] = {}
    for name in data.draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True)):
        kind = data.draw(st.sampled_from(TYPES))
        match data.draw(st.integers(0, 3)):
            case 0:
                fields[name] = (kind, ...)
            case 1:
                fields[name] = (Optional[kind], None)  # noqa: UP045  # `kind | None` fails for None itself.
            case 2:
                fields[name] = (list[kind], Field(default_factory=list, description="some"))
            case _:
                fields[name] = (dict[str, kind], ...)
    assert_kept(create_model("Made", **fields), 2)
