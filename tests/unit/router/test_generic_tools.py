"""Tools for models whose template has no place for them: in the prompt, in the grammar and in the answer."""

import json

import openai
import pytest

from router.text.generic_tools import with_tools_as_text
from router.text.parsers.deltas import CallArguments, CallStart, Message, ToolCall
from router.text.parsers.families import Generic
from router.text.parsers.repeats import RepeatGuard
from router.text.tokenizer import Tokenizer
from tests.unit.router import http_fakes
from tests.unit.router.http_fakes import MODEL, FakeWorker, make_folder

PLAIN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT_TURNS = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}[assistant]"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function"} | {"function": {"name": "get_weather", "arguments": '{"city":"Ulm"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def folder_of(path, template):
    made = make_folder(path / "tiny")
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("model"), PLAIN)


@pytest.fixture(scope="module")
def ids(folder):
    rust = Tokenizer.load(str(folder))._rust
    return lambda text: rust.encode(text, add_special_tokens=False).ids


def cluster(folder, *workers, **fields):
    return http_fakes.cluster(folder, *workers, context=2048, **fields)


async def ask(c, **fields):
    body = {"model": MODEL, "messages": [USER], "max_tokens": 300, "tools": [WEATHER]} | fields
    return (await c.openai().chat.completions.create(**body)).choices[0]


def prompt_of(c):
    return c.router.models.first.tokenizer.decode(list(c.worker.started[-1].tokens))


async def test_tools_are_offered_in_the_system_message_and_calls_are_read(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids(f"I look.\n{CALL}"))) as c:
        system = {"role": "system", "content": "Be kind."}
        choice = await ask(c, messages=[system, USER])
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})
        prompt = prompt_of(c)
        assert prompt.startswith("[system]Be kind.\n\n# Tools\n")
        assert '"name":"get_weather"' in prompt
        assert prompt.endswith("[user]Weather?[assistant]")
        await ask(c, messages=[system, USER], tool_choice="none")
        assert prompt_of(c) == "[system]Be kind.[user]Weather?[assistant]"


async def test_earlier_calls_and_results_are_text_even_without_tools(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids("ok"))) as c:
        again = {"role": "user", "content": "And now?"}
        await ask(c, messages=[USER, CALLED, RESULT, RESULT, again], tools=openai.NOT_GIVEN)
        call = CALL.replace('": ', '":').replace(', "', ',"')
        results = "<tool_response>\nrain\n</tool_response>\n" * 2
        assert prompt_of(c) == f"[user]Weather?[assistant]{call}[user]{results}And now?[assistant]"


async def test_a_template_without_system_messages_gets_the_tools_from_the_user(tmp_path, ids):
    folder = folder_of(tmp_path, STRICT_TURNS)
    async with cluster(folder, FakeWorker(reply=ids(CALL))) as c:
        choice = await ask(c, messages=[USER, CALLED, RESULT])
        assert choice.finish_reason == "tool_calls"
        assert prompt_of(c).startswith("[user]# Tools\n")
        assert prompt_of(c).endswith("[user]<tool_response>\nrain\n</tool_response>[assistant]")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_have_the_grammar_of_the_form_that_the_prompt_names(folder, ids, choice):
    async with cluster(folder, FakeWorker(reply=ids(CALL))) as c:
        found = await ask(c, tool_choice=choice)
        assert (found.message.content, found.finish_reason) == (None, "tool_calls")
        form = json.loads(c.worker.started[-1].sampling.grammar.text)["format"]
        assert (form["at_least_one"], form["stop_after_first"]) == (True, choice == NAMED)
        (tag,) = form["tags"]
        assert tag["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
        assert tag["content"]["json_schema"]["required"] == ["city"]


async def test_a_call_that_comes_again_ends_the_answer(folder, ids):
    other = CALL.replace("Ulm", "Ulmen")
    async with cluster(folder, FakeWorker(reply=ids("\n".join([CALL, other, CALL, CALL, other])))) as c:
        choice = await ask(c, tool_choice="required")
        cities = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
        assert (cities, choice.finish_reason) == (["Ulm", "Ulmen"], "tool_calls")


def test_a_call_is_held_back_only_while_it_may_be_a_repetition():
    guard = RepeatGuard()
    first = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
    assert guard.kept(first) == first
    assert guard.kept([CallStart(1, "f"), CallArguments(1, '{"a": ')]) == []
    freed = [CallStart(1, "f"), CallArguments(1, '{"a": '), CallArguments(1, "2}")]
    assert guard.kept([CallArguments(1, "2}")]) == freed
    assert guard.kept([CallStart(2, "f"), CallArguments(2, '{"a": 1}'), CallStart(3, "f")]) == []
    assert guard.is_repeated


def test_a_call_that_the_end_cut_off_is_sent():
    guard = RepeatGuard()
    guard.kept([CallStart(0, "f"), CallArguments(0, '{"a": 1}')])
    held = [CallStart(1, "f"), CallArguments(1, '{"a"')]
    assert guard.kept(held) == []
    assert guard.finish() == held


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', ""),
        ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', ""),
        ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', ""),
        ('So:\n<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "So:"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>\n{"na', ""),
    ],
)
def test_forms_that_models_fall_back_to_are_calls(text, content):
    for pieces in ([text], list(text)):
        parser, message = Generic(["f"]), Message()
        for piece in pieces:
            message.add(parser.feed(piece))
        message.add(parser.finish())
        assert message.calls == [ToolCall("f", '{"a": 1}')]
        assert message.content.strip() == content


@pytest.mark.parametrize("text", ['{"name": "Bob"}', "```\ncode\n```", "[1] Smith", "<tool_call>no", '{"na'])
def test_other_text_stays_content(text):
    parser, message = Generic(["f"]), Message()
    for piece in text:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    assert (message.content, message.calls) == (text, [])


def test_messages_without_tools_are_as_they_were():
    messages = [{"role": "system", "content": "x"}, USER, {"role": "assistant", "content": "y"}]
    assert with_tools_as_text(messages, []) == messages
