"""Lark's grammars: what their EBNF accepts once it is compiled, and what is refused."""

import json
import re

import pytest

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.structured.grammars import check_ebnf
from engine.structured.lark import ebnf_of_lark, is_lark, only_schema
from engine.structured.regex_ebnf import ebnf_of_regex
from tests.grammar_walks import Walker

WALKER = Walker()
ARITHMETIC = r"""
?start: expression  // comments are left out
?expression: term (("+" | "-") term)*
?term: factor (("*" | "/") factor)*
?factor: NUMBER
       | "-" factor
       | "(" expression ")"
%import common.NUMBER
%import common.WS
%ignore WS
"""
GUIDANCE = """%llguidance {}

start: "hi " z " there " SELECT
z[capture]: Z
Z: /[a-z]+/

SELECT: "u"
     | "v"
"""
QUERY = r"""
start: "SELECT"i " " col ("," col)~1..2 [" WHERE " cond] -> query
col: /[a-z_]\w*/ | STAR
STAR.2: "*"
cond: col "=" (ESCAPED_STRING | INT | "a".."c")
%import common (ESCAPED_STRING, INT)
"""
CASES = [
    (ARITHMETIC, ["1+2*(3-4)", "-5", " 1 + 2.5"], ["1+", "x", "1  2"]),
    (GUIDANCE, ["hi abc there v"], ["hi  there v", "hi abc there w"]),
    (QUERY, ['select a,b WHERE a="x"', "SELECT *,b", "SELECT a,b WHERE a=b"], ["SELECT a", "SELECT a,b W"]),
    ('start: (A | "é"i)+\nA: /x{2,3}|[^\\s\\x41-Z]\\/"/s', ["xxÉé", '!/"', "xxx"], ["x", 'B/"', ' /"']),
]  # fmt: skip


@pytest.mark.parametrize(("lark", "valid", "invalid"), CASES)
def test_what_the_language_says_is_what_is_accepted(lark, valid, invalid):
    assert is_lark(lark)
    ebnf = check_ebnf(ebnf_of_lark(lark, "g"), "g")
    compiled = WALKER.compile(Grammar(GrammarKind.EBNF, ebnf))
    assert [WALKER.accepts(compiled, text) for text in valid] == [True] * len(valid)
    assert [WALKER.accepts(compiled, text) for text in invalid] == [False] * len(invalid)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_generated_under_a_regular_expression_matches_it(seed):
    for regex in (r"a(b|cd)?[^x-z]{2,4}\d+", r"(\w+,)*\S", r"[a\-\]^]?(?:x|)"):
        grammar = Grammar(GrammarKind.EBNF, f"root ::= {ebnf_of_regex(regex, 'g')}\n")
        text = WALKER.walk(WALKER.compile(grammar), seed, patience=0)
        assert re.fullmatch(regex, text, re.ASCII)


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ("a: b", "no rule named start"),
        ("start: b", "line 1, column 8: there is no rule 'b'"),
        ('start: "a\n', "unexpected"),
        ("start: /(?=a)b/", "look-around"),
        ("start: a\na[max_tokens=5]: /x/", "line 2, column 3: the attribute 'max_tokens' cannot be enforced"),
        ("start: %json {}", "'%json' is missing|not supported|a rule must"),
        ("%import python.NAME\nstart: NAME", "only terminals of the library 'common'"),
        ("start: a{b}", "not supported|must"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested groups"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_place(lark, words):
    with pytest.raises(ClientError, match=words) as error:
        check_ebnf(ebnf_of_lark(lark, "g"), "g")
    assert error.value.param == "g" or error.value.param.startswith("g ")


def test_a_grammar_that_is_one_schema_is_that_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = f"%llguidance {{}}\n\nstart: j\n\nj[capture]: %json {json.dumps(schema, indent=2)}\n\n"
    assert json.loads(only_schema(text)) == schema
    assert only_schema(GUIDANCE) is None
