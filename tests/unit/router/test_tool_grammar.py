"""Grammars of tool calls: refused schemas are named by their path, and workers accept all others."""

import json

import pytest

from baton.core.errors import ClientError
from engine.structured.grammars import check_grammar
from router.openai.tool_grammar import tool_grammar
from router.text.conversation import check_tool_use

STR = {"type": "string"}


def many(count):
    return {f"p{i}": STR for i in range(count)}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_no_call_can_have_are_refused(choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    with pytest.raises(ClientError, match="no text fulfils it") as error:
        tool_grammar(check_tool_use([tool], choice, is_parallel=True), "hermes")
    assert error.value.param == "tools[0].function.parameters.$ref"


def test_many_tools_together_are_bounded_as_one_schema():
    function = {"parameters": {"type": "object", "properties": many(200)}}
    tools = [{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(6)]
    with pytest.raises(ClientError, match="at most 1024"):
        tool_grammar(check_tool_use(tools, "required", is_parallel=True), "hermes")


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}, "$defs": {"n": STR}}


def asked(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return check_tool_use([tool], "required", is_parallel=True)


def test_a_forced_call_passes_the_worker_unchanged():
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#"}},
        "$defs": {"n": {"type": "integer", "minimum": 1.5}},
    }
    grammar = tool_grammar(asked(parameters), "hermes")
    assert check_grammar(grammar, "g") == json.loads(grammar.text)


def test_parameters_that_a_call_nests_too_deep_are_refused_at_the_door():
    tool_grammar(asked(nested(55)), "hermes")
    with pytest.raises(ClientError, match="nested deeper"):
        tool_grammar(asked(nested(62)), "hermes")
