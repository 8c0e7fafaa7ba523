"""Answers as bytes: any text in any pieces becomes events of valid JSON, which add up to the whole answer."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.errors import BatonError
from baton.core.ids import RequestId, SequenceId
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.steps import TokenLogprobs
from router.decisions.events import Finished, Submit
from router.http.streaming import ResponseStream
from router.live.defects import INTERNAL
from router.openai.call import Endpoint
from router.openai.choice_stream import ChoiceOptions
from router.openai.logprobs import LogprobFormat
from router.openai.responses import AnswerFormat
from router.text.conversation import Tool, ToolMode, ToolUse
from router.text.detokenizer import Detokenizer
from router.text.parsers.deltas import Message
from router.text.parsers.select import TOOL_PARSERS, Parsers, make_parser, reasoning_start
from router.text.surrogates import replaced
from tests.unit.router.test_parsers import FRAGMENTS, NAMES

TOOLS = tuple(Tool(name, {}, False, {}) for name in NAMES)
LONE = "\\ud800"
"""Half of a surrogate pair, as JSON and Python write it."""


class FakeFlusher:
    def __init__(self):
        self.due = []

    def add(self, flush):
        self.due.append(flush)

    def run(self):
        due, self.due = self.due, []
        for flush in due:
            flush()


class FakeDriver:
    def __init__(self):
        self.flusher = FakeFlusher()
        self.sinks = {}

    def now_s(self):
        return asyncio.get_running_loop().time()

    def submit(self, submit, sink):
        self.sinks[submit.seq_id] = sink

    def client_gone(self, seq_id):
        self.sinks.pop(seq_id, None)
        return False

    def answered(self, seq_id):
        self.sinks.pop(seq_id, None)

    def progress_of(self, seq_id):
        return None, None


class Answer:
    """One answer, made by the production classes from pieces of text instead of tokens."""

    def __init__(self, pieces, *, parser=None, endpoint=Endpoint.CHAT, logprobs=False, stops=()):
        self.driver = FakeDriver()
        self.pieces = pieces
        form = AnswerFormat(
            endpoint,
            request_id="r",
            created=1,
            model="m",
            system_fingerprint=lambda: "f",
            include_usage=True,
        )
        now_s = asyncio.get_running_loop().time()
        self.response = ResponseStream(self.driver, form, deadline_s=now_s + 60, unsent_tokens_max=10**6)
        self.with_logprobs = logprobs
        bytes_of = lambda token: pieces[token].encode("utf-8", "surrogatepass")  # noqa: E731
        format_of = LogprobFormat(bytes_of, is_chat=endpoint is Endpoint.CHAT) if logprobs else None
        sampling = SamplingParams(max_tokens=10_000)
        submit = Submit(SequenceId("r/0"), RequestId("r"), (1,), sampling, salt=b"", deadline_s=1e9)
        detokenizer = Detokenizer(lambda ids: "".join(pieces[i] for i in ids), stops=stops)
        options = ChoiceOptions(parser=parser, logprobs=format_of, new_call_id=lambda: "call")
        self.response.submit([(submit, detokenizer, options)])

    async def generate(self):
        for at in range(len(self.pieces)):
            if (sink := self.driver.sinks.get("r/0")) is None:
                return
            if self.with_logprobs:
                sink.on_logprobs((TokenLogprobs(at, -0.5, 1, ((at, -0.5),)),), None)
            sink.on_tokens((at,), cached_token_count=0)
            self.driver.flusher.run()
            if at % 2:
                await asyncio.sleep(0)
        if (sink := self.driver.sinks.pop("r/0", None)) is not None:
            sink.on_finished(Finished(SequenceId("r/0"), FinishReason.STOP, len(self.pieces), 0))
        self.driver.flusher.run()

    async def whole(self):
        await self.generate()
        return await self.response.whole()

    async def streamed(self, *, write_now=lambda written, events: False):
        written = []

        async def write(events):
            written.append(events)

        task = asyncio.create_task(
            self.response.stream(
                write,
                include_usage=True,
                on_drop=lambda error: None,
                write_now=lambda events: write_now(written, events),
            )
        )
        await asyncio.sleep(0)
        await self.generate()
        last = await task
        return b"".join([*written, last])


def write_at_once(written, events):
    written.append(events)
    return True


def events_of(data: bytes):
    """Return the JSON of all events, and whether [DONE] ends them."""
    *events, end = data.decode("utf-8").split("\n\n")
    assert not end
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    texts = [event.removeprefix("data: ") for event in events]
    is_done = bool(texts) and texts[-1] == "[DONE]"
    return [json.loads(text) for text in (texts[:-1] if is_done else texts)], is_done


def summed(events):
    """Return what the events say: (content, reasoning, calls, finish reason, logprobs, usage)."""
    content, reasoning, calls, finish, logprobs, usage = "", "", [], None, [], None
    for event in events:
        usage = event["usage"] or usage
        for choice in event["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            logprobs += (choice["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return content, reasoning, calls, finish, logprobs, usage


def parts_of(whole: bytes):
    body = json.loads(whole.decode("utf-8"))
    [choice] = body["choices"]
    said = choice.get("message", {"content": choice.get("text")})
    calls = [call["function"] for call in said.get("tool_calls", ())]
    logprobs = (choice["logprobs"] or {}).get("content", [])
    return (
        said["content"] or "",
        said.get("reasoning_content", ""),
        calls,
        choice["finish_reason"],
        logprobs,
        body["usage"],
    )


# --- parsers ------------------------------------------------------------------------------------------


def parser_of(tool, reasoning="", *, mode=ToolMode.AUTO, is_parallel=True):
    return make_parser(
        Parsers(tool, reasoning),
        ToolUse(TOOLS, mode, "f", is_parallel),
        reasoning_start(reasoning, ""),
        is_constrained=False,
        with_reasoning=True,
    )


MODES = [
    *(
        (tool, reasoning, ToolMode.AUTO)
        for tool in TOOL_PARSERS
        for reasoning in ("", "qwen3", "deepseek_r1")
    ),
    ("harmony", "harmony", ToolMode.AUTO),
    ("harmony", "harmony", ToolMode.NAMED),
    ("hermes", "", ToolMode.NAMED),
    ("hermes", "qwen3", ToolMode.REQUIRED),
    ("hermes", "qwen3", ToolMode.NONE),
]
ANY_CHARACTER = st.text(st.characters(), max_size=6)  # lone surrogates, too
ESCAPES = st.sampled_from(
    [LONE, "\\udc00", "\\ud83d\\ude00", "\\u00e9", "\\\\ud800", "\\n", "\x00", "\ufffd"]
)
CALLS = st.sampled_from(
    [
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '{"name": "f", "parameters": "\\ud800"}',
        "[f(a='\\ud800', b='\\udc00')]",
        '[TOOL_CALLS][{"arguments": "\\udfff", "name": "f"}]',
        'functools[{"name": "f", "arguments": "x\\ud800"}]',
        "<tool_call><function=f><parameter=a>NaN</parameter></function></tool_call>",
        '[{"name": "f", "parameters": {"a": "\\ud800"}}, {"name": "f", "parameters": {}}]',
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, CALLS, ESCAPES, ANY_CHARACTER), max_size=6).map("".join)


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges) if b > a]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(MODES),
    TEXTS,
    st.lists(st.integers(0, 10**6), max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("##",), ("}",), (" ", "x")]),
)
@example(("pythonic", "", ToolMode.AUTO), "[f(a='\\ud800')]", [], True, False, ())
@example(("hermes", "", ToolMode.AUTO), "\ud800 \udc00", [1], True, True, ())
def test_events_of_any_text_in_any_pieces_are_json_and_add_up_to_the_whole(
    mode, text, places, is_parallel, logprobs, stops
):
    tool, reasoning, tool_mode = mode

    async def answers():
        made = [
            Answer(
                pieces,
                parser=parser_of(tool, reasoning, mode=tool_mode, is_parallel=is_parallel),
                logprobs=logprobs,
                stops=stops,
            )
            for pieces in (cut(text, places), cut(text, places), cut(text, places), [text] if text else [])
        ]
        writing = await made[0].streamed(), await made[1].streamed(write_now=write_at_once)
        return *writing, await made[2].whole(), await made[3].whole()

    streamed, at_once, whole, in_one_piece = asyncio.run(answers())
    for data in (streamed, at_once):
        events, is_done = events_of(data)
        assert is_done
        assert summed(events) == parts_of(whole)
    assert parts_of(whole)[:4] == parts_of(in_one_piece)[:4]


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10**6), max_size=8), st.booleans())
def test_a_completions_events_add_up_to_the_text(text, places, logprobs):
    async def answers():
        made = [Answer(cut(text, places), endpoint=Endpoint.COMPLETION, logprobs=logprobs) for _ in range(2)]
        return await made[0].streamed(), await made[1].whole()

    streamed, whole = asyncio.run(answers())
    events, is_done = events_of(streamed)
    assert is_done
    assert summed(events)[0] == parts_of(whole)[0] == replaced(text)


QUOTED = '{"a": "\\ud800", "b": ["\\udc00x", "\\ud83d\\ude00"]}'
ARGUMENTS = {"a": "\ud800", "b": ["\udc00x", "\U0001f600"]}
TWICE = json.dumps(json.dumps(ARGUMENTS, ensure_ascii=False).replace("\ud800", LONE))
"""Arguments in a string, one of whose halves is written as itself and the other as an escape."""
LONE_CALLS = {
    "hermes": [
        f'<tool_call>{{"name": "f", "arguments": {QUOTED}}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {TWICE}}}</tool_call>',
        f'<tool_call>{{"arguments": {TWICE}, "name": "f"}}</tool_call>',
    ],
    "generic": [f'<tool_call>{{"name": "f", "arguments": {TWICE}}}</tool_call>'],
    "llama3_json": [f'{{"name": "f", "parameters": {QUOTED}}}', f'{{"name": "f", "parameters": {TWICE}}}'],
    "pythonic": ["[f(a='\\ud800', b=['\\udc00x', '\\U0001f600'])]"],
    "mistral": [
        f'[TOOL_CALLS][{{"name": "f", "arguments": {TWICE}}}]',
        f"[TOOL_CALLS]f[ARGS]{QUOTED}",
    ],
    "deepseek_v3": [f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{QUOTED}<｜tool▁call▁end｜>"],
    "phi4_mini_json": [f'functools[{{"name": "f", "arguments": {TWICE}}}]'],
    "qwen3_coder": [
        '<tool_call><function=f><parameter=a>"\\ud800"</parameter>'
        f"<parameter=b>{json.dumps(ARGUMENTS['b'])}</parameter></function></tool_call>"
    ],
    "harmony": [f"<|start|>assistant<|channel|>commentary to=functions.f<|message|>{QUOTED}<|call|>"],
}


def test_every_family_has_a_case():
    assert LONE_CALLS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in LONE_CALLS.items() for text in texts]
)
def test_halves_of_surrogate_pairs_in_arguments_stay_escapes(family, text):
    async def answers():
        made = [Answer(list(text), parser=parser_of(family)) for _ in range(2)]
        return await made[0].streamed(), await made[1].whole()

    streamed, whole = asyncio.run(answers())
    events, is_done = events_of(streamed)
    assert is_done
    _, _, [call], finish, *_ = summed(events)
    assert (call["name"], finish) == ("f", "tool_calls")
    wanted = dict(ARGUMENTS)
    if family == "qwen3_coder":
        wanted["a"] = '"\\ud800"'  # a value is text, and only what is no string is read as JSON
    assert json.loads(call["arguments"]) == wanted
    assert parts_of(whole)[2] == [call]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "[NaN]"])
def test_constants_that_json_lacks_are_text(constant):
    text = f"<tool_call><function=f><parameter=a>{constant}</parameter></function></tool_call>"
    message = Message()
    parser = parser_of("qwen3_coder")
    message.add(parser.feed(text) + parser.finish())
    assert json.loads(message.calls[0].arguments) == {"a": constant}


# --- defects ------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What a native library raises: no Exception."""


def broken_at(method, call, error):
    """Return a function that raises instead of its `call`-th call."""
    calls = 0

    def breaks(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return method(*args, **kwargs)

    return breaks


BREAKS = [
    (AnswerFormat, "rich_chunk", 1),
    (AnswerFormat, "rich_chunk", 3),
    (AnswerFormat, "first_chunk", 1),
    (AnswerFormat, "last_chunk", 1),
    (AnswerFormat, "end_chunk", 1),
]


@pytest.mark.parametrize(("kind", "name", "call"), BREAKS)
@pytest.mark.parametrize("error", [TypeError("surrogates"), RecursionError(), Panic()], ids=repr)
@pytest.mark.parametrize("write_now", [lambda written, events: False, write_at_once], ids=["later", "now"])
def test_a_defect_in_making_events_ends_the_stream_with_an_error(
    monkeypatch, caplog, kind, name, call, error, write_now
):
    text = "one two three four five"
    monkeypatch.setattr(kind, name, broken_at(getattr(kind, name), call, error))

    async def answer():
        made = Answer(list(text), parser=parser_of("hermes"))
        return await made.streamed(write_now=write_now), made

    streamed, made = asyncio.run(answer())
    *events, last = events_of(streamed)[0]
    assert b"[DONE]" not in streamed
    assert last["error"]["message"] == INTERNAL
    content = summed(events)[0]
    assert text.startswith(content)
    if name != "end_chunk":
        assert summed(events)[3] is None, "the choice did not finish"
    assert isinstance(made.response.error, BatonError)
    assert not made.driver.sinks
    assert "defect in the answer of r" in caplog.text
