"""The shape that a request asks of its answer, as a `Grammar`. Pure.

A request says it in OpenAI's `response_format`, in vLLM's `structured_outputs` or in one of the older
`guided_*` fields, and in one of them only. Schemas that cannot be enforced are refused here, by the same
check that the worker makes.
"""

from typing import Any

import msgspec
import orjson

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.structured.grammars import check_choices, check_ebnf, check_regex, check_structural_tag
from engine.structured.schemas import check_schema
from router.openai.bodies import Body
from router.text.json_bounds import JsonBudget

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","additionalProperties":true}')


class Structured(msgspec.Struct, frozen=True):
    grammar: Grammar
    field: str
    """The field of the request that asked for it."""


def grammar_of(body: Body) -> Structured | None:
    """Return the grammar that the request asks for. Raises ClientError that names the field and the
    keyword."""
    asked = [
        (name, value)
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        if (value := getattr(body, name)) is not None
    ]
    found = [Structured(_of_kind(name.removeprefix("guided_"), value, name), name) for name, value in asked]
    if body.structured_outputs is not None:
        found.append(_of_structured_outputs(body.structured_outputs))
    if body.response_format is not None:
        one = _of_response_format(body.response_format)
        found += [] if one is None else [one]
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise ClientError(f"{names} exclude each other", param=found[1].field)
    return found[0] if found else None


def _of_kind(kind: str, value: Any, where: str) -> Grammar:
    match kind:
        case "json":
            return schema_grammar(_schema_of(value, where), where)
        case "json_object":
            return ANY_OBJECT
        case "regex":
            return Grammar(GrammarKind.REGEX, check_regex(value, where))
        case "choice":
            return Grammar(GrammarKind.CHOICE, orjson.dumps(check_choices(value, where)).decode())
        case "grammar":
            return Grammar(GrammarKind.EBNF, check_ebnf(value, where))
        case "structural_tag":
            return structural_grammar(value, where)
        case _:
            raise ClientError(f"{where} is not known", param=where)


def schema_grammar(schema: Any, where: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(check_schema(schema, where)).decode())


def structural_grammar(tag: Any, where: str) -> Grammar:
    if isinstance(tag, str):
        tag = _decoded(tag, where)
    return Grammar(GrammarKind.STRUCTURAL_TAG, orjson.dumps(check_structural_tag(tag, where)).decode())


def _schema_of(value: Any, where: str) -> Any:
    return _decoded(value, where) if isinstance(value, str) else value


def _decoded(text: str, where: str) -> Any:
    JsonBudget().take(text.encode(), where)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ClientError(f"{where} is not valid JSON: {error}", param=where) from error


_OPTIONS = frozenset(
    {"disable_any_whitespace", "disable_fallback", "disable_additional_properties", "whitespace_pattern"}
)
"""Fields of vLLM's `structured_outputs` that configure the matching. They name no shape."""


def _of_structured_outputs(value: Any) -> Structured:
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    for option in _OPTIONS & value.keys():
        if value[option]:
            raise ClientError(f"{where}.{option} is not supported; leave it out", param=f"{where}.{option}")
    kinds = [name for name in value if value[name] not in (None, False) and name not in _OPTIONS]
    if not kinds and value.get("json") is False:
        kinds = ["json"]  # The check of schemas says what is wrong with it.
    if len(kinds) != 1:
        raise ClientError(
            f"{where} must have exactly one of json, json_object, regex, choice, grammar, structural_tag",
            param=where,
        )
    field = f"{where}.{kinds[0]}"
    return Structured(_of_kind(kinds[0], value[kinds[0]], field), field)


def _of_response_format(value: Any) -> Structured | None:
    where = "response_format"
    if not isinstance(value, dict):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Structured(ANY_OBJECT, where)
        case "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            path = f"{where}.json_schema.schema"
            if schema is None:
                raise ClientError(f"{path} is required", param=path, code="missing_required_parameter")
            return Structured(schema_grammar(schema, path), where)
        case "structural_tag":
            return Structured(structural_grammar(value, where), where)
        case kind:
            raise ClientError(
                f"{where}.type must be text, json_object, json_schema or structural_tag, not {kind!r:.60}",
                param=f"{where}.type",
            )
