"""Everything about structured output but single schemas: regular expressions, EBNF, choices, structural tags.
Pure.

`check_grammar` is what the worker calls on a grammar that arrives; the router has called the same functions
on what the client sent.
"""

from typing import Any

import msgspec

from baton.core.sampling import Grammar, GrammarKind
from engine.structured.ebnf_size import GRAMMAR_CHARACTERS_MAX, ebnf_size
from engine.structured.patterns import regex_size
from engine.structured.refusal import refuse
from engine.structured.schemas import check_schema
from engine.structured.tags import check_structural_tag

CHOICES_MAX = 4096


def check_regex(text: Any, where: str) -> str:
    """Check that the regular expression is matched as it is meant, and small enough."""
    regex_size(text, where)
    return text


def check_ebnf(text: Any, where: str) -> str:
    """Check that the grammar is well formed, and small enough to be compiled in seconds."""
    ebnf_size(text, where)
    return text


def check_characters(text: str, where: str) -> None:
    """Refuse a grammar in Lark's language that is too long to be translated."""
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        raise refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters, not {len(text)}")


def check_choices(choices: Any, where: str) -> list[str]:
    if not isinstance(choices, list) or not 1 <= len(choices) <= CHOICES_MAX:
        raise refuse(where, "", f"must be a list of 1 to {CHOICES_MAX} strings")
    if not all(isinstance(one, str) and one for one in choices):
        raise refuse(where, "", "must be a list of strings that are not empty")
    if sum(map(len, choices)) > GRAMMAR_CHARACTERS_MAX:
        raise refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters in all")
    return list(dict.fromkeys(choices))


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
