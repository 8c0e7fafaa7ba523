"""The shape that a request asks of its answer, as a `Grammar`. Pure.

A request says it in OpenAI's `response_format`, in vLLM's `structured_outputs` or older `guided_*` fields, or
in SGLang's or llama.cpp's fields, and says one thing only. Schemas that cannot be enforced are refused here,
by the same check that the worker makes.
"""

import re
from typing import Any

import msgspec
import orjson

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.structured.grammars import (
    check_characters,
    check_choices,
    check_ebnf,
    check_regex,
    check_structural_tag,
)
from engine.structured.lark import ebnf_of_lark, is_lark, only_schema
from engine.structured.schemas import COMPACT, WHITE_SPACE, check_schema
from router.openai.bodies import Body
from router.text.json_bounds import JsonBudget

_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Fields of a request that name a shape at once: vLLM's older ones, SGLang's and llama.cpp's."""


class Structured(msgspec.Struct, frozen=True):
    grammar: Grammar
    field: str
    """The field of the request that asked for it."""


def grammar_of(body: Body) -> Structured | None:
    """Return the grammar that the request asks for. Raises ClientError that names the field and the
    keyword."""
    space = _white_space(body)
    found = [
        Structured(_of_kind(kind, value, name, space), name)
        for name, kind in _FIELDS.items()
        if (value := getattr(body, name)) is not None
    ]
    if body.structured_outputs is not None and (
        one := _of_structured_outputs(body.structured_outputs, space)
    ):
        found.append(one)
    if body.response_format is not None and (one := _of_response_format(body.response_format, space)):
        found.append(one)
    # guidance says the same in a new and an old field at once.
    if any(one.grammar != found[0].grammar for one in found):
        names = " and ".join(one.field for one in found)
        raise ClientError(f"{names} exclude each other", param=found[1].field)
    return found[0] if found else None


def _white_space(body: Body) -> str:
    """Return how JSON is spaced: "" as the model likes, or COMPACT."""
    options = body.structured_outputs if isinstance(body.structured_outputs, dict) else {}
    pattern = options.get("whitespace_pattern", body.guided_whitespace_pattern)
    if pattern is not None and not _may_be_nothing(pattern):
        field = "structured_outputs.whitespace_pattern" if options else "guided_whitespace_pattern"
        raise ClientError(f"{field} must allow no white space at all, such as '[ ]?'", param=field)
    return COMPACT if options.get("disable_any_whitespace") or pattern is not None else ""


def _may_be_nothing(pattern: Any) -> bool:
    """Return whether a pattern of white space allows none, so that compact JSON keeps it."""
    if not isinstance(pattern, str) or len(pattern) > 100:
        return False
    try:
        return re.fullmatch(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _of_kind(kind: str, value: Any, where: str, space: str = "") -> Grammar:
    match kind:
        case "json":
            return schema_grammar(_schema_of(value, where), where, space)
        case "json_object":
            return schema_grammar({"type": "object"}, where, space)
        case "regex":
            return Grammar(GrammarKind.REGEX, check_regex(value, where))
        case "choice":
            return Grammar(GrammarKind.CHOICE, orjson.dumps(check_choices(value, where)).decode())
        case "grammar":
            return _grammar(value, where)
        case "structural_tag":
            return structural_grammar(value, where)
        case _:
            raise ClientError(f"{where} is not known", param=where)


def _grammar(text: Any, where: str) -> Grammar:
    """Return a grammar in EBNF, or in Lark's language, which is written in EBNF here."""
    if isinstance(text, str) and is_lark(text):
        check_characters(text, where)
        if (schema := only_schema(text)) is not None:
            return schema_grammar(_decoded(schema, where), where)
        text = ebnf_of_lark(text, where)
    return Grammar(GrammarKind.EBNF, check_ebnf(text, where))


def schema_grammar(schema: Any, where: str, space: str = "") -> Grammar:
    """Return the grammar of a schema. `space` is COMPACT for JSON without white space."""
    if space and isinstance(schema, dict):
        schema = {**schema, WHITE_SPACE: space}
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
"""Fields of vLLM's `structured_outputs` that configure the matching, and name no shape. There is nothing to
fall back to, and objects that are silent about further properties have none."""


def _of_structured_outputs(value: Any, space: str) -> Structured | None:
    where = "structured_outputs"
    if not isinstance(value, dict):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    kinds = [name for name in value if value[name] not in (None, False) and name not in _OPTIONS]
    if not kinds and value.get("json") is False:
        kinds = ["json"]  # The check of schemas says what is wrong with it.
    if not kinds and _OPTIONS & value.keys():
        return None  # options for the shape that another field names
    if len(kinds) != 1:
        raise ClientError(
            f"{where} must have exactly one of json, json_object, regex, choice, grammar, structural_tag",
            param=where,
        )
    field = f"{where}.{kinds[0]}"
    return Structured(_of_kind(kinds[0], value[kinds[0]], field, space), field)


def _of_response_format(value: Any, space: str) -> Structured | None:
    where = "response_format"
    if not isinstance(value, dict):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")  # llama.cpp's
            path = f"{where}.schema"
            found = _of_kind("json_object" if schema is None else "json", schema, path, space)
            return Structured(found, where)
        case "json_schema":
            inner = value.get("json_schema", value)  # llama.cpp's has the schema at once
            schema = inner.get("schema") if isinstance(inner, dict) else None
            path = f"{where}.json_schema.schema"
            if schema is None:
                raise ClientError(f"{path} is required", param=path, code="missing_required_parameter")
            return Structured(schema_grammar(schema, path, space), where)
        case "regex" | "grammar" as kind if value.get(kind) is not None:
            return Structured(_of_kind(kind, value[kind], f"{where}.{kind}"), where)
        case "structural_tag":
            return Structured(structural_grammar(value, where), where)
        case kind:
            raise ClientError(
                f"{where}.type must be text, json_object, json_schema, structural_tag, regex or grammar (the "
                f"last two with a field of that name), not {kind!r:.60}",
                param=f"{where}.type",
            )
