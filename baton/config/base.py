"""Base class and common types of the sections of `baton.config`."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import SetupError
from baton.core.policies import EVICTION_POLICIES, PLACEMENT_POLICIES
from baton.core.shape import Shape

Seconds = Annotated[float, Field(gt=0, le=86_400)]


SECRET = "secret"
"""Mark in a setting's schema: its value may hold a password."""

SecretText = Annotated[str, Field(json_schema_extra={SECRET: True})]


_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kKMGT])(i?)B?", re.ASCII)
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def in_bytes(text: str) -> int | None:
    """Return the bytes of a size with a unit: 512MiB, 1.5GiB and 512Mi are powers of 1024, 500MB and 500M of
    1000. None: the text has no such unit."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: Any) -> Any:
        """Numbers of bytes may be given as sizes with a unit."""
        if not isinstance(values, dict):
            return values
        fields = cast(dict[str, Any], values)
        sizes = {
            name: size
            for name, value in fields.items()
            if "bytes" in name and isinstance(value, str) and (size := in_bytes(value)) is not None
        }
        return {**fields, **sizes} if sizes else fields

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Hide passwords, so that a configuration that finds its way into a log shows none."""
        for name, value in super().__repr_args__():
            yield name, "***" if value and name in secret_fields(type(self)) else value


def secret_fields(section: type[BaseModel]) -> frozenset[str]:
    """Return the settings of a section that are marked with SECRET."""
    return frozenset(
        name
        for name, info in section.model_fields.items()
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get(SECRET)
    )


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    known = tuple(names)

    def check(name: str) -> str:
        if name not in known:
            raise PydanticCustomError("policy", "should be one of {names}", {"names": ", ".join(known)})
        return name

    return check


def _choices(names: Iterable[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


PlacementPolicyName = Annotated[
    str, AfterValidator(_one_of(PLACEMENT_POLICIES)), WithJsonSchema(_choices(PLACEMENT_POLICIES))
]
EvictionPolicyName = Annotated[
    str, AfterValidator(_one_of(EVICTION_POLICIES)), WithJsonSchema(_choices(EVICTION_POLICIES))
]


def _offload(text: str | int) -> str:
    found = str(text)  # a file of models may say `offload: 12`
    if not (found in ("all", "auto") or (found.isascii() and found.isdigit() and len(found) <= 6)):
        raise PydanticCustomError("offload", "should be a number of layers, all or auto")
    return found if found in ("all", "auto") else str(int(found))


OffloadText = Annotated[str, BeforeValidator(_offload, str | int), WithJsonSchema({"type": "string"})]


def _shape(text: str | int) -> str:
    try:
        return str(Shape.parse(str(text)))  # a file of models may say `shape: 1`
    except SetupError as error:
        raise PydanticCustomError("shape", "{reason}", {"reason": str(error)}) from None


ShapeText = Annotated[str, BeforeValidator(_shape, str | int), WithJsonSchema({"type": "string"})]
"""The ranks of a worker, see `baton.core.shape`."""
