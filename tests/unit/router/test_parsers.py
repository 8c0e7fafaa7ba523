"""Text to messages, by family: the message does not depend on how the text arrived."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ClientError, SetupError
from router.text.conversation import Tool, ToolMode, ToolUse
from router.text.parsers.deltas import Message, ToolCall
from router.text.parsers.families import (
    DeepSeek,
    ForcedCall,
    ForcedCalls,
    Hermes,
    Llama3Json,
    Mistral,
    Phi4Mini,
    Pythonic,
    Qwen3Coder,
)
from router.text.parsers.reasoning import Harmony, Think
from router.text.parsers.select import Parsers, choose_parsers, make_parser, reasoning_start

NAMES = ("f", "get_weather")
DS = {"b": "<｜tool▁calls▁begin｜>", "c": "<｜tool▁call▁begin｜>", "s": "<｜tool▁sep｜>"}
DS |= {"e": "<｜tool▁call▁end｜>", "E": "<｜tool▁calls▁end｜>"}


def tools(kind):
    return lambda: kind(NAMES)


def thinks(*, is_open):
    return lambda: Think(is_open=is_open)


F1 = ToolCall("f", '{"a": 1}')
# fmt: off
CASES = [
    # The columns are parser, text, content, reasoning, calls.
    (tools(Hermes),
     'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"], "b": "x\\"y"}}\n</tool_call>\n'
     '<tool_call>{"arguments": {"q":1}, "name":"get_weather"}</tool_call>\n',
     "Let me see.", "", [ToolCall("f", '{"a": [1, "}"], "b": "x\\"y"}'), ToolCall("get_weather", '{"q":1}')]),
    (tools(Hermes), 'A <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> B', "A B", "", [F1]),
    (tools(Hermes), '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x',
     '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> x', "", []),
    (tools(Hermes), "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", "", []),
    (tools(Hermes), 'a < b and <tool_c', "a < b and <tool_c", "", []),
    (tools(Hermes), '<tool_call>{"name": "f", "arguments": {"a": 1] </tool_call>',
     "", "", [ToolCall("f", '{"a": 1] ')]),
    (tools(Hermes), '<tool_call>{"name": "f", "arguments": {"a": 1', "", "", [ToolCall("f", '{"a": 1')]),
    (tools(Hermes), '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [F1]),
    (tools(Hermes), '<tool_call>{"name": "f"}</tool_call>', "", "", [ToolCall("f", "{}")]),
    (tools(Hermes), "  plain text \n", "  plain text \n", "", []),
    (tools(Llama3Json), '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
     "", "", [F1, ToolCall("get_weather", "{}")]),
    (tools(Llama3Json), '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", "", [F1]),
    (tools(Llama3Json), '{"name": "Bob", "age": 3} is it', '{"name": "Bob", "age": 3} is it', "", []),
    (tools(Llama3Json), 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', "", []),
    (tools(Pythonic), "[f(a=1), get_weather(city='Pa]ris', n=[1, 2])]", "", "",
     [F1, ToolCall("get_weather", '{"city": "Pa]ris", "n": [1, 2]}')]),
    (tools(Pythonic), "[1] Smith et al.", "[1] Smith et al.", "", []),
    (tools(Pythonic), "[f(a=open('x'))]", "[f(a=open('x'))]", "", []),
    (tools(Mistral), 'ok [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
     "ok", "", [F1, ToolCall("f", "{}")]),
    (tools(Mistral), '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{"b": 2}', "", "",
     [F1, ToolCall("get_weather", '{"b": 2}')]),
    (tools(Mistral), '[TOOL_CALLS]nope[ARGS]{"a": 1}', '[TOOL_CALLS]nope[ARGS]{"a": 1}', "", []),
    (tools(DeepSeek),
     ('Sure.{b}{c}function{s}f\n```json\n{{"a": 1}}\n```{e}\n'
      '{c}function{s}get_weather\n```json\n{{}}\n```{e}{E}').format(**DS),
     "Sure.", "", [F1, ToolCall("get_weather", "{}")]),
    (tools(DeepSeek), '{b}{c}f{s}{{"a": 1}}{e}{E}'.format(**DS), "", "", [F1]),
    (tools(DeepSeek), '{b}{c}nope{s}{{}}{e}'.format(**DS), '{b}{c}nope{s}{{}}{e}'.format(**DS), "", []),
    (tools(Phi4Mini), 'functools[{"name": "f", "arguments": {"a": 1}}]', "", "", [F1]),
    (tools(Phi4Mini), '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', "", "", [F1]),
    (tools(Phi4Mini), "functools is a module", "functools is a module", "", []),
    (tools(Qwen3Coder),
     "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nsay \"x\"\n</parameter>\n"
     "</function>\n</tool_call>", "", "", [ToolCall("f", '{"a": 1, "b": "say \\"x\\""}')]),
    (lambda: ForcedCall("f"), '{"a": 1}', "", "", [F1]),
    (tools(ForcedCalls), '[{"name": "f", "parameters": {"a": 1}}]', "", "", [F1]),
    (thinks(is_open=False), "<think>\nhm\n\n</think>\n\nHi <think> there", "Hi <think> there", "hm", []),
    (thinks(is_open=True), "hm </thi </think> Hi", "Hi", "hm </thi", []),
    (thinks(is_open=True), "never ends", "", "never ends", []),
    (thinks(is_open=False), " Hi </think>", " Hi </think>", "", []),
    (tools(Harmony),
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', "", "hm", [F1]),
    (tools(Harmony),
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
     "Hi.", "hm", []),
    (tools(Harmony), "no channels", "no channels", "", []),
]
# fmt: on


def parsed(parser, pieces):
    message = Message()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message


@pytest.mark.parametrize(("make", "text", "content", "reasoning", "calls"), CASES)
def test_each_family(make, text, content, reasoning, calls):
    expected = Message(content, reasoning, calls)
    assert parsed(make(), [text]) == expected
    assert parsed(make(), text) == expected  # The text comes one character at a time.


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# fmt: off
FRAGMENTS = st.sampled_from([
    *(case[1] for case in CASES), *DS.values(), "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "functools[",
    '{"name": "f", "arguments": ', '{"a": [1', "}", "]", '"', "\\", "\n", " ", "x", "f(a=1)", "<|message|>",
    "<|channel|>", "<|start|>", "<think>", "</think>", "<function=f>", "<parameter=a>", ";", ",",
])
KINDS = (Hermes, Llama3Json, Pythonic, Mistral, DeepSeek, Phi4Mini, Qwen3Coder, Harmony, ForcedCalls)
MAKERS = [*map(tools, KINDS), thinks(is_open=True), thinks(is_open=False), lambda: ForcedCall("f")]
# fmt: on


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(MAKERS),
    st.lists(FRAGMENTS, max_size=5).map("".join),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_any_text_in_any_pieces_is_the_same_message(make, text, places):
    """No text makes a parser fail, either."""
    assert parsed(make(), cut(text, places)) == parsed(make(), [text])


TOOL = Tool("f", {"type": "object"}, False, {})


def use(mode, **fields):
    return ToolUse((TOOL,), mode, "f" if mode is ToolMode.NAMED else "", **fields)


def test_reasoning_and_calls_are_told_apart_in_one_text():
    start = reasoning_start("qwen3", "<|im_start|>assistant\n<think>\n")
    parser = make_parser(
        Parsers("hermes", "qwen3"), use(ToolMode.AUTO), start, is_constrained=False, with_reasoning=True
    )
    text = 'I <tool_call> think</think>\n\nWell. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parsed(parser, text) == Message("Well.", "I <tool_call> think", [F1])
    assert parser.has_calls


def test_one_call_at_a_time_if_the_client_says_so():
    start = reasoning_start("", "")
    parser = make_parser(
        Parsers("hermes", ""),
        use(ToolMode.AUTO, is_parallel=False),
        start,
        is_constrained=False,
        with_reasoning=True,
    )
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parsed(parser, [call, call]) == Message("", "", [F1])
    assert parser.is_done


def test_under_a_grammar_only_what_follows_the_reasoning_is_content():
    """The grammar began at the closing tag, whether or not the model wrote the opening one."""
    start = reasoning_start("qwen3", "<|im_start|>assistant\n")
    parser = make_parser(Parsers("", "qwen3"), ToolUse(), start, is_constrained=True, with_reasoning=False)
    assert parsed(parser, ["free text</think>", '{"a": 1}']) == Message('{"a": 1}', "", [])


def test_a_prompt_that_closed_its_reasoning_leaves_none():
    start = reasoning_start("qwen3", "<think>\n\n</think>\n\n")
    assert (
        make_parser(Parsers("", "qwen3"), ToolUse(), start, is_constrained=False, with_reasoning=True) is None
    )


def test_calls_that_nobody_could_read_are_refused():
    start = reasoning_start("", "")
    with pytest.raises(ClientError, match="required"):
        make_parser(Parsers(), use(ToolMode.AUTO), start, is_constrained=False, with_reasoning=True)


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("{{ tools }}<tool_call>", "qwen2", Parsers("hermes", "")),
        ("tools <tool_call> <think>", "qwen3", Parsers("hermes", "qwen3")),
        ("tools [TOOL_CALLS]", "mistral", Parsers("mistral", "")),
        ("tools" + DS["b"] + "</think>", "deepseek_v3", Parsers("deepseek_v3", "deepseek_r1")),
        ("tools <|python_tag|>", "llama", Parsers("llama3_json", "")),
        ("tools <|channel|>", "gpt_oss", Parsers("harmony", "harmony")),
        ("tools <|tool_call|>", "phi3", Parsers("phi4_mini_json", "")),
        ("nothing", "gemma3_text", Parsers("generic", "")),
        ("tools in a form of its own", "x", Parsers("generic", "")),
        ("<tool_call> in the history alone", "x", Parsers("generic", "")),
    ],
)
def test_the_template_tells_the_family(template, model_type, expected):
    assert choose_parsers(tool="", reasoning="", template=template, model_type=model_type) == expected
    assert choose_parsers(tool="none", reasoning="none", template=template, model_type="x") == Parsers()


def test_an_unknown_parser_is_a_setup_error():
    with pytest.raises(SetupError, match="hermes"):
        choose_parsers(tool="klingon", reasoning="", template="", model_type="")


def test_streamed_arguments_are_the_json_that_was_generated():
    arguments = {"text": 'a "quoted" } brace', "list": [1, {"b": None}], "ü": "é"}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    message = parsed(Hermes(NAMES), text)
    assert json.loads(message.calls[0].arguments) == arguments
