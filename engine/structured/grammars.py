"""Everything about structured output but single schemas: regular expressions, EBNF, choices, structural tags.
Pure.

`check_grammar` is what the worker calls on a grammar that arrives; the router has called the same functions
on what the client sent. Only the compiler reads EBNF, so what is wrong within its rules is found by the
worker.
"""

import re
from typing import Any

import msgspec

from baton.core.sampling import Grammar, GrammarKind
from engine.structured.patterns import check_pattern
from engine.structured.refusal import refuse
from engine.structured.schemas import SCHEMA_DEPTH_MAX, check_bytes, check_schema
from engine.structured.size import check_sizes

GRAMMAR_CHARACTERS_MAX = 64 * 1024
CHOICES_MAX = 4096
_ROOT_RULE = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


def check_regex(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise refuse(where, "", "must be a regular expression")
    if "\0" in text:
        raise refuse(where, "", "may have no null characters")
    check_pattern(text, where, in_json=False)
    return text


def check_ebnf(text: Any, where: str) -> str:
    """Check the size and that a root rule is there. The compiler says what is wrong within the rules."""
    if not isinstance(text, str) or not text.strip():
        raise refuse(where, "", "must be a grammar in EBNF (GBNF)")
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        raise refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters, not {len(text)}")
    if "\0" in text:
        raise refuse(where, "", "may have no null characters")
    if not _ROOT_RULE.search(text):
        raise refuse(where, "", "has no rule named root ('root ::= …')")
    return text


def check_choices(choices: Any, where: str) -> list[str]:
    if not isinstance(choices, list) or not 1 <= len(choices) <= CHOICES_MAX:
        raise refuse(where, "", f"must be a list of 1 to {CHOICES_MAX} strings")
    if not all(isinstance(one, str) and one for one in choices):
        raise refuse(where, "", "must be a list of strings that are not empty")
    if sum(map(len, choices)) > GRAMMAR_CHARACTERS_MAX:
        raise refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters in all")
    return list(dict.fromkeys(choices))


def check_structural_tag(tag: Any, where: str) -> dict[str, Any]:
    """Check xgrammar's format, or OpenAI-style structures and triggers, which become it."""
    if not isinstance(tag, dict):
        raise refuse(where, "", "must be an object")
    if "format" not in tag:
        tag = {"type": "structural_tag", "format": _format_of_structures(tag, where)}
    check_bytes(tag, where)
    check_sizes(tag["format"], where)
    checked = {"type": "structural_tag", "format": _checked_format(tag["format"], f"{where}.format", depth=0)}
    # What was rewritten is judged again by the worker, as a whole.
    check_bytes(checked, where)
    check_sizes(checked["format"], where)
    return checked


def check_grammar(grammar: Grammar, where: str) -> Any:
    """What the compiler is to be given for a grammar that arrives on the wire. Raises ClientError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return check_schema(_decoded(grammar.text, where), where)
        case GrammarKind.REGEX:
            return check_regex(grammar.text, where)
        case GrammarKind.EBNF:
            return check_ebnf(grammar.text, where)
        case GrammarKind.CHOICE:
            return check_choices(_decoded(grammar.text, where), where)
        case GrammarKind.STRUCTURAL_TAG:
            return check_structural_tag(_decoded(grammar.text, where), where)


def _decoded(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refuse(where, "", f"is not valid JSON: {error}") from error


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


def _format_of_structures(tag: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        structures = msgspec.convert(tag.get("structures"), list[_Structure])
        triggers = msgspec.convert(tag.get("triggers"), list[str])
    except msgspec.ValidationError as error:
        raise refuse(where, "", f"needs a format, or structures and triggers: {error}") from error
    tags = [
        {"type": "tag", "begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema}}
        | {"end": one.end}
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _checked_format(node: Any, path: str, *, depth: int) -> Any:
    if depth > SCHEMA_DEPTH_MAX:
        raise refuse(path, "", f"is nested deeper than {SCHEMA_DEPTH_MAX}")
    if isinstance(node, list):
        return [_checked_format(one, f"{path}[{i}]", depth=depth + 1) for i, one in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if node.get("type") in ("json_schema", "qwen_xml_parameter") or "json_schema" in node:
        for option in ("any_order", "excludes"):
            if node.get(option):
                raise refuse(path, option, "cannot be enforced together with a schema; leave it out")
        return node | {"json_schema": check_schema(node.get("json_schema"), f"{path}.json_schema")}
    match node.get("type"):
        case "regex":
            check_regex(node.get("pattern"), f"{path}.pattern")
        case "grammar":
            check_ebnf(node.get("grammar"), f"{path}.grammar")
        case _:
            pass
    return {key: _checked_format(value, f"{path}.{key}", depth=depth + 1) for key, value in node.items()}
