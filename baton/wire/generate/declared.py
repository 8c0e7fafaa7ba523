"""What is declared: the services' messages and everything that they are made of, with its documentation."""

import ast
import inspect
import textwrap
import typing
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec

from baton.wire.generate.fields import FieldPlan, plan
from baton.wire.generate.kinds import WireKind, kind_of
from baton.wire.services import SERVICES, Envelope, RpcService, Stream


@dataclass(frozen=True, slots=True)
class Docs:
    """Documentation of a class, and of its fields or members by name."""

    of_class: str
    of_fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class MessagePlan:
    struct: type[msgspec.Struct]
    fields: tuple[FieldPlan, ...]
    docs: Docs


@dataclass(frozen=True, slots=True)
class ListPlan:
    """A message that holds one list, so that no list and an empty one differ."""

    kind: WireKind


Plan = MessagePlan | ListPlan | Envelope | type[StrEnum]


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service, and what it is the first to need."""

    service: RpcService
    plans: tuple[Plan, ...]


@cache
def docs_of(declared: type) -> Docs:
    body = ast.parse(textwrap.dedent(inspect.getsource(declared))).body[0]
    assert isinstance(body, ast.ClassDef)
    fields: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                fields[name] = inspect.cleandoc(text)
            case _:
                pass
    return Docs(inspect.cleandoc(ast.get_docstring(body) or ""), fields)


def message_plan(struct: type[msgspec.Struct]) -> MessagePlan:
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = tuple(plan(struct.__name__, name, hints[name]) for name in struct.__struct_fields__)
    return MessagePlan(struct, fields, docs_of(struct))


def declared_of(message: type[msgspec.Struct] | Envelope | Stream) -> Any:
    """The struct or envelope that a call takes or returns."""
    return message.message if isinstance(message, Stream) else message


def sections(services: tuple[RpcService, ...] = SERVICES) -> tuple[ServicePlan, ...]:
    """Services in their order; each message stands with the first service that needs it."""
    seen: dict[Any, None] = {}
    lists: dict[str, None] = {}
    found: list[ServicePlan] = []
    for service in services:
        plans: list[Plan] = []
        for call in service.calls:
            for message in (call.request, call.reply):
                _visit(declared_of(message), seen, lists, plans)
        found.append(ServicePlan(service, tuple(plans)))
    return tuple(found)


def _visit(declared: Any, seen: dict[Any, None], lists: dict[str, None], plans: list[Plan]) -> None:
    if declared in seen:
        return
    seen[declared] = None
    if isinstance(declared, Envelope):
        plans.append(declared)
        for variant in declared.variants:
            _visit(kind_of(variant).declared, seen, lists, plans)
        return
    if issubclass(declared, StrEnum):
        plans.append(declared)
        return
    message = message_plan(declared)
    plans.append(message)
    for field in message.fields:
        if field.list_of is not None and field.list_of.proto not in lists:
            lists[field.list_of.proto] = None
            plans.append(ListPlan(field.list_of))
        for used in field.uses:
            _visit(used, seen, lists, plans)
