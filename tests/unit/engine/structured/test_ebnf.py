"""Grammars in EBNF are read by the judge as the compiler reads them, and refused where they would not compile
in seconds."""

import random

import pytest
from xgrammar import Grammar as Compilable

from baton.core.errors import ClientError
from engine.structured.ebnf import MACROS
from engine.structured.grammars import check_ebnf, check_regex, check_structural_tag
from engine.structured.schemas import check_schema

SEEDS = [
    'root ::= "a" b* (c | [a-z]+)?  # hi\nb ::= "x\\n" {2,3}\nc ::= ("q" "" | [^\\]\\-a-z]{2,})+\n',
    'root ::= x{2}\r\n  x ::= [a\\x41-\\u0045-] ( ) "\\U0001F600é"\n',
    'root ::= "a" (= "b")\n',
    'root ::= a-b.c\na-b.c ::= [é-ü] "\\"" {1, -1}',
]
PIECES = [
    *('"a"', "[a-z]", "[", '"', "|", "(", ")", "*", "+", "?", "{2}", "{2,3}", "{3,2}", "{,2}", "{2,}", "::="),
    *("\nq ::= ", "root", " b ", "\n", "\r", "#", "\\", "[^-]", "[a-]", "[-a]", "[z-a]", "[a--]", "[--z]"),
    *(
        "[\\d]",
        "true",
        "1",
        "-1",
        " -",
        ".",
        "=",
        "(=",
        ",",
        ":",
        "é",
        "\\x",
        "\\n",
        '"\\q"',
        "[\\q]",
        "[\\$]",
    ),
    *('"\\$"', '"\\/"', '_x ::= "a"\n', "[a-z-9]", "[a-\\x5a]", "[\\--a]", "[+\\--a]", " ::= ", "()", "{0}"),
]


def judged(text):
    try:
        return check_ebnf(text, "g") is None
    except ClientError as error:
        return str(error)


def compiled(text):
    try:
        Compilable.from_ebnf(text)
    except (RuntimeError, ValueError) as error:  # the latter where its message is no UTF-8
        return str(error)


def test_the_judge_and_the_compiler_read_the_same_language():
    rng = random.Random(1)
    taken = 0
    for _ in range(3000):
        text = rng.choice(SEEDS)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            at = rng.randrange(len(text) + 1)
            if rng.random() < 0.4:
                text = text[:at] + text[at + rng.randrange(1, 4) :]
            else:
                text = text[:at] + rng.choice(PIECES) + text[at:]
        ours, theirs = judged(text), compiled(text)
        # The compiler alone knows the rules of lookahead; we alone know that there are 0x110000 characters.
        if (ours and "no character" in ours) or (theirs and "lookahead" in theirs):
            continue
        assert (not ours) == (not theirs), (text, ours, theirs)
        taken += not ours
    assert taken > 300


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("a ::= b", "", "no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "defined twice"),
        ('root ::=\n  foo "a"', "line 2, column 3", "no rule 'foo'"),
        ('root ::= "a', "line 1, column 10", "closing quote"),
        ("root ::= [z-a]", "line 1, column 10", "range"),
        ('root ::= "\\q"', "line 1, column 10", "escape"),
        ('root ::= ("a"', "line 1, column 14", "')' is missing"),
        ('root ::= "a"{3,2}', "line 1, column 16", "upper bound"),
        ('root[max_tokens=3] ::= "a"', "line 1, column 5", "attributes"),
        *[(f'root ::= {name}("a")', "line 1, column 10", f"macro {name}") for name in sorted(MACROS)],
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, place, what):
    with pytest.raises(ClientError, match=r"^structured_outputs\.grammar: ") as raised:
        check_ebnf(text, "structured_outputs.grammar")
    assert place in str(raised.value)
    assert what in str(raised.value)


def rules(count, body):
    return "root ::= r0\n" + "\n".join(f"r{i} ::= {body(i)}" for i in range(count))


COSTLY = {
    # name: (grammar, what the refusal names)
    "loops in a row": ("root ::= " + "[a-z]* " * 300, "in a row"),
    "optional parts in a row": ("root ::= " + "[a-z]? " * 1000, "in a row"),
    "optional parts of another rule": ("root ::= x x x\nx ::= " + '"a"? ' * 30, "in a row"),
    "optional parts, repeated": ('root ::= ("a"? "b"?){50}', "in a row"),
    "nested loops": ("root ::= " + "(" * 40 + "[a-z]" + ' | "b")*' * 40, "nested repetitions"),
    "nested groups": ("root ::= " + "(" * 80 + '"a"' + ")" * 80, "nested groups"),
    "alternatives that begin alike": (
        rules(60, lambda i: "|".join(f"[a-z] r{(i * 7 + j) % 60}" for j in range(20))),
        "1024 alternatives and repetitions",
    ),
    "one choice of many": ("root ::= " + "|".join(f'[a-z]+ "{i}"' for i in range(1000)), "a choice of 1000"),
    "texts": ("root ::= " + "|".join(f'"{i}"' for i in range(5000)), "texts"),
    "rules": (rules(3000, lambda i: f'"{i}"'), "3000 rules|3001 rules"),
    "repetitions written out": ('root ::= (("abcdefgh"{50}){50}){50}', "elements"),
    "a number that is no number": ('root ::= "a"{99999999999}', "a number up to"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_would_take_too_long_to_compile_is_refused_with_its_bound(name):
    text, what = COSTLY[name]
    with pytest.raises(ClientError, match=what) as raised:
        check_ebnf(text, "guided_grammar")
    assert raised.value.param == "guided_grammar"
    form = {"type": "tag", "begin": "<a>", "content": {"type": "grammar", "grammar": text}, "end": "</a>"}
    with pytest.raises(ClientError, match=what) as raised:
        check_structural_tag({"type": "structural_tag", "format": form}, "s")
    assert raised.value.param == "s.format.content.grammar"


def test_the_grammars_of_a_tag_count_together():
    text = "root ::= " + "|".join(f'[a-z]+ "{i}"' for i in range(100))
    one = {"type": "grammar", "grammar": text}
    check_structural_tag({"format": {"type": "or", "elements": [one] * 4}}, "s")
    with pytest.raises(ClientError, match="at most 1024"):
        check_structural_tag({"format": {"type": "or", "elements": [one] * 6}}, "s")


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ({"type": "sequence", "elements": [{"type": "optional", "content": "C"}] * 100}, "in a row"),
        ({"type": "or", "elements": ["C"] * 300}, "300 formats"),
        ({"type": "repeat", "min": 0, "max": 10**6, "content": "C"}, "written out"),
        ({"type": "repeat", "min": 3, "max": 2, "content": "C"}, "whole numbers"),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]{1,9000}"}] * 3},
            "written out",
        ),
    ],
    ids=["optional", "choices", "repeat", "backwards", "regexes"],
)
def test_the_formats_of_a_tag_are_bounded(form, what):
    with pytest.raises(ClientError, match=what):
        check_structural_tag({"format": form}, "s")


def test_nested_repetitions_of_a_tag_are_bounded():
    form = {"type": "const_string", "value": "a"}
    for _ in range(20):
        form = {"type": "star", "content": form}
    with pytest.raises(ClientError, match="nested repetitions"):
        check_structural_tag({"format": form}, "s")


@pytest.mark.parametrize(
    "pattern",
    ["[a-z]*" * 300, "(a?b?){50}", "(" * 40 + "[a-z]" + "|b)*" * 40],
    ids=["loops", "repeated", "nested"],
)
def test_regular_expressions_are_bounded_alike(pattern):
    with pytest.raises(ClientError, match=r"in a row|nested repetitions"):
        check_regex(pattern, "guided_regex")


@pytest.mark.parametrize(
    "text", [r"[\ud800-\udfff]", r"[a\udc00]", r"[\u0000-\ud9ff]", r"\ud83d\ude00", r"\ud83d"]
)
def test_halves_of_surrogate_pairs_are_refused(text):
    """xgrammar makes the model write them as three bytes each, which are no UTF-8."""
    with pytest.raises(ClientError, match="surrogate"):
        check_regex(text, "guided_regex")
    with pytest.raises(ClientError, match="surrogate"):
        check_schema({"type": "string", "pattern": text}, "schema")
    with pytest.raises(ClientError, match="surrogate"):
        check_ebnf("root ::= " + (text if text.startswith("[") else f'"{text}"'), "guided_grammar")


@pytest.mark.parametrize(
    "text", [r"[^\ud800-\udfff]", r"[\u0000-\uffff]", r"[\ue000-\uffff]", "[\U0001f600]"]
)
def test_classes_around_surrogates_are_taken(text):
    check_regex(text, "guided_regex")
    check_ebnf(f"root ::= {text}", "guided_grammar")


def test_what_people_write_is_taken():
    """Each part may be left out, and there is something between: white space in a grammar of a language."""
    words = " ".join(f'"w{i}" ws' for i in range(500))
    check_ebnf(f"root ::= {words}\nws ::= [ \\t]*", "g")
    levels = "\n".join(f'e{i} ::= e{i + 1} (("+" | "-") ws e{i + 1})*' for i in range(20))
    check_ebnf(f'root ::= e0\n{levels}\ne20 ::= [0-9]+ ws | "(" ws e0 ")" ws\nws ::= [ \\t\\n]*', "g")
    check_ebnf('root ::= ([0-9]{1,200} ("." [0-9]{0,200})?){1,20}', "g")


def test_chains_of_rules_need_no_stack():
    check_ebnf(
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(2000)) + '\nr2000 ::= "a"', "g"
    )
