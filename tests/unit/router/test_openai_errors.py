"""Client errors get the right status, OpenAI's error shape, and the name of the field."""

import asyncio
import contextlib

import msgspec
import openai
import orjson
import pytest

from baton.core.errors import MESSAGE_CHARS_MAX, PARAM_CHARS_MAX, ClientError
from baton.core.messages import FailureReason, SequenceFailed
from router.openai.checks import check_seed
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import CONTEXT, MODEL, FakeWorker, called, cluster, make_folder, soon

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def chat(**fields):
    return CHAT, {"model": MODEL, "messages": USER} | fields


def completion(**fields):
    return COMPLETION, {"model": MODEL, "prompt": "hi"} | fields


def without(case, field):
    path, body = case
    return path, {key: value for key, value in body.items() if key != field}


BAD = [
    # The columns are request, status, param, code or None, words in the message.
    (chat(model="other"), 404, "model", "model_not_found", "other"),
    (without(chat(), "model"), 400, "model", "missing_required_parameter", "model"),
    (without(chat(), "messages"), 400, "messages", "missing_required_parameter", "messages"),
    (chat(model=3), 400, "model", "invalid_type", "int"),
    (chat(messages=[]), 400, "messages", None, "empty"),
    (chat(messages=USER * 8193), 400, "messages", None, "8192"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 8193}]),
        400, "messages[0].content", None, "8192",
    ),
    (chat(messages="hi"), 400, "messages", "invalid_type", "array"),
    (chat(messages=["hi"]), 400, "messages[0]", "invalid_type", "object"),
    (chat(messages=[{"content": "x"}]), 400, "messages[0].role", None, "role"),
    (chat(messages=[{"role": "king", "content": "x"}]), 400, "messages[0].role", None, "king"),
    (chat(messages=[{"role": ["user"], "content": "x"}]), 400, "messages[0].role", None, "role"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content", "invalid_type", "content"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", "invalid_type", "text"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400, "messages[0].content[0]", None, "image_url",
    ),
    (chat(max_tokens=0), 400, "max_tokens", None, "at least 1"),
    (chat(max_tokens=-5), 400, "max_tokens", None, "-5"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens", None, "at least 1"),
    (chat(max_tokens=10**30), 400, "max_tokens", "context_length_exceeded", str(CONTEXT)),
    (chat(max_tokens=CONTEXT), 400, "messages", "context_length_exceeded", str(CONTEXT)),
    (chat(max_tokens="many"), 400, "max_tokens", "invalid_type", "int"),
    (chat(max_tokens=1.5), 400, "max_tokens", "invalid_type", "int"),
    (chat(temperature=3), 400, "temperature", None, "2"),
    (chat(temperature=-0.1), 400, "temperature", None, "-0.1"),
    (chat(top_p=1.1), 400, "top_p", None, "1.1"),
    (chat(top_k=-2), 400, "top_k", None, "-2"),
    (chat(n=0), 400, "n", None, "1"),
    (chat(n=17), 400, "n", None, "16"),
    (chat(seed=2**70), 400, "seed", None, "64 bits"),
    (chat(stop=["x"] * 17), 400, "stop", None, "16"),
    (chat(stop=""), 400, "stop", None, "characters"),
    (chat(stop=[1]), 400, "stop[0]", "invalid_type", "int"),
    (chat(stream="yes"), 400, "stream", "invalid_type", "bool"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", None, "stream"),
    (chat(stop_token_ids=[512]), 400, "stop_token_ids", None, "511"),
    (chat(top_logprobs=3), 400, "top_logprobs", None, "logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", None, "20"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0].function", "invalid_type", "object"),
    (chat(tools=[{"type": "web"}]), 400, "tools[0].type", None, "web"),
    (chat(tools={}), 400, "tools", "invalid_type", "list"),
    (chat(tools=[TOOL, TOOL]), 400, "tools", None, "two"),
    (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), 400,
     "tools[0].function.name", None, "128"),
    (chat(tool_choice="required"), 400, "tool_choice", None, "tools"),
    (chat(tools=[TOOL], tool_choice="sometimes"), 400, "tool_choice", None, "auto"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400, "tool_choice", None, "'g'",
    ),
    (chat(messages=[*USER, {"role": "user", "content": "x", "tool_calls": []}]), 400,
     "messages[1].tool_calls", "invalid_type", "assistant"),
    (chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
     400,
     "messages[0].tool_calls[0].function.arguments", "invalid_type", "JSON"),
    (chat(response_format={"type": "yaml"}), 400, "response_format.type", None, "yaml"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema.schema",
     "missing_required_parameter", "required"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}), 400,
     "response_format.json_schema.schema.not", "unsupported_grammar", "enforced"),
    (chat(guided_regex="(a"), 400, "guided_regex", "unsupported_grammar", "')'"),
    (chat(guided_regex="a{1,1000000}"), 400, "guided_regex", "unsupported_grammar", "more repetitions"),
    (chat(guided_regex="a{,2}"), 400, "guided_regex", "unsupported_grammar", "malformed"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type", None, "regex or grammar"),
    (chat(guided_choice=[]), 400, "guided_choice", "unsupported_grammar", "list"),
    (chat(guided_grammar="a ::= b"), 400, "guided_grammar", "unsupported_grammar", "root"),
    (chat(guided_regex="a", guided_choice=["b"]), 400, "guided_choice", None, "exclude"),
    (chat(structured_outputs={"json": {}, "regex": "a"}), 400, "structured_outputs", None, "one of"),
    (chat(logit_bias={"1": 500}), 400, "logit_bias", None, "100"),
    (chat(logit_bias={"x": 5}), 400, "logit_bias", None, "'x'"),
    (chat(logit_bias={"512": 5}), 400, "logit_bias", None, "511"),
    (chat(presence_penalty=3), 400, "presence_penalty", None, "2"),
    (chat(frequency_penalty=True), 400, "frequency_penalty", "invalid_type", "float"),
    (chat(repetition_penalty=0), 400, "repetition_penalty", None, "0.01"),
    (chat(min_p=1.5), 400, "min_p", None, "1.5"),
    (chat(min_tokens=9, max_tokens=5), 400, "min_tokens", None, "5"),
    (chat(allowed_token_ids=[]), 400, "allowed_token_ids", None, "empty"),
    (chat(allowed_token_ids=[512]), 400, "allowed_token_ids", None, "511"),
    (chat(allowed_token_ids=[7], guided_regex="a"), 400, "allowed_token_ids", None, "guided_regex"),
    (
        chat(allowed_token_ids=[7], tools=[TOOL], tool_choice="required"),
        400, "allowed_token_ids", None, "tool_choice",
    ),
    (
        chat(allowed_token_ids=[7, 8], stop_token_ids=[7, 8], min_tokens=1),
        400, "allowed_token_ids", None, "min_tokens",
    ),
    (chat(guided_json={"$ref": "#"}), 400, "guided_json.$ref", "unsupported_grammar", "no text"),
    (chat(structured_outputs={"json": False}), 400, "structured_outputs.json", "unsupported_grammar",
     "no value"),
    (chat(bad_words=["x"]), 400, "bad_words", "unsupported_parameter", "bad_words"),
    (chat(prompt_logprobs=21), 400, "prompt_logprobs", None, "20"),
    (chat(baton={"tpot_ms": 0}), 400, "baton.tpot_ms", None, "above 0"),
    (chat(baton={"ttft_ms": -1}), 400, "baton.ttft_ms", None, "above 0"),
    (chat(baton={"slo_class": "x"}), 400, "baton.slo_class", None, "none"),
    (chat(service_tier=5), 400, "service_tier", "invalid_type", "str"),
    (chat(baton={"what": 1}), 400, "baton", "invalid_type", "what"),
    (chat(priority=2**40), 400, "priority", None, "priority"),
    (chat(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", None, "1"),
    (chat(use_beam_search=True, presence_penalty=1), 400, "presence_penalty", None, "beam"),
    (chat(use_beam_search=True, temperature=0.7), 400, "temperature", None, "beam"),
    (chat(use_beam_search=True, top_p=0.9), 400, "top_p", None, "beam"),
    (chat(use_beam_search=True, top_k=5), 400, "top_k", None, "beam"),
    (chat(use_beam_search=True, min_p=0.1), 400, "min_p", None, "beam"),
    (chat(length_penalty=2), 400, "length_penalty", None, "beam"),
    (chat(chat_template="{{ 1 }}"), 400, "chat_template", "unsupported_parameter", "chat_template"),
    (chat(chat_template_kwargs={"tools": []}), 400, "chat_template_kwargs", None, "tools"),
    (chat(documents=[{"text": "x"}]), 400, "documents", "unsupported_parameter", "template"),
    (chat(continue_final_message=True), 400, "continue_final_message", None, "assistant"),
    (completion(best_of=2, n=3), 400, "best_of", None, "3"),
    (completion(best_of=99), 400, "best_of", None, "16"),
    (completion(suffix="x"), 400, "suffix", "unsupported_parameter", "suffix"),
    (completion(logprobs=21), 400, "logprobs", None, "20"),
    (completion(max_tokens=0), 400, "max_tokens", None, "at least 1"),
    (without(completion(), "prompt"), 400, "prompt", "missing_required_parameter", "prompt"),
    (completion(prompt=[]), 400, "prompt", None, "empty"),
    (completion(prompt=""), 400, "prompt", None, "empty"),
    (completion(prompt=["a", ""]), 400, "prompt", None, "empty"),
    (completion(prompt=[[]]), 400, "prompt", None, "empty"),
    (completion(prompt=["a", 1]), 400, "prompt", "invalid_type", "list"),
    (completion(prompt=[1, "a"]), 400, "prompt", "invalid_type", "token id"),
    (completion(prompt=[True]), 400, "prompt", "invalid_type", "list"),
    (completion(prompt=[1.5]), 400, "prompt", "invalid_type", "list"),
    (completion(prompt={"a": 1}), 400, "prompt", "invalid_type", "object"),
    (completion(prompt=[512]), 400, "prompt", None, "511"),
    (completion(prompt=[-1]), 400, "prompt", None, "-1"),
    (completion(prompt=[[3], [999]]), 400, "prompt[1]", None, "999"),
    (completion(prompt=[-1] * CONTEXT), 400, "prompt", "context_length_exceeded", str(CONTEXT)),
    (completion(prompt=["a"] * 17), 400, "prompt", None, "16"),
    (completion(prompt=[7] * CONTEXT), 400, "prompt", "context_length_exceeded", str(CONTEXT)),
    (completion(max_tokens=CONTEXT), 400, "prompt", "context_length_exceeded", str(CONTEXT)),
]  # fmt: skip


async def test_bad_requests_name_the_field(folder):
    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        for (path, body), status, param, code, words in BAD:
            for stream in (False, True):
                sent = body | {"stream": True} if stream and "stream" not in body else body
                if stream and "stream_options" in body:
                    continue
                answer = await http.post(path, json=sent)
                where = f"{path} {body}: {answer.status_code} {answer.text}"
                assert answer.status_code == status, where
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, where
                assert (error["type"], error["param"], error["code"]) == (
                    "invalid_request_error", param, code,
                ), where  # fmt: skip
                assert words in error["message"], where
        assert c.worker.started == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'model': 'x'}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "temperature": 1e999}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_bodies_that_are_not_requests(folder, path, body):
    async with cluster(folder) as c, c.http() as http:
        answer = await http.post(path, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_what_is_not_utf8_is_named_by_its_place_in_the_body(folder):
    async with cluster(folder) as c, c.http() as http:
        answer = await http.post(CHAT, content=b'{"model": "\xff"}')
        assert answer.json()["error"]["message"] == "the body is not UTF-8: invalid start byte at byte 11"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "tiny", "prompt": "\\ud83d"}', "no low surrogate in string: line 1 column 30 (char 29)"),
        (b'{"model": "tiny",\n "prompt": x}', "line 2 column 12"),
        (b'{"model": "tiny"', "unexpected end of data: line 1 column 17"),
    ],
)
async def test_json_that_is_wrong_is_named_by_its_place(folder, body, says):
    async with cluster(folder) as c, c.http() as http:
        answer = await http.post(COMPLETION, content=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_have_the_same_shape(folder):
    async with cluster(folder) as c, c.http() as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/nothing", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/other", 404),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
        assert (await http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


HUGE = "x" * 1_000_000
FUNCTION = {"type": "function", "function": {"name": HUGE, "parameters": {"type": "object"}}}


def schema(**keywords):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": keywords}})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(model=HUGE),
        chat(messages=[{"role": HUGE, "content": "x"}]),
        chat(messages=[{"role": "user", "content": [{"type": HUGE}]}]),
        chat(tools=[FUNCTION, FUNCTION]),
        chat(tools=[{"type": HUGE}]),
        chat(tools=[TOOL], tool_choice=HUGE),
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": HUGE}}),
        chat(response_format={"type": HUGE}),
        schema(type=HUGE),
        schema(type="object", properties={HUGE: {"type": "king"}}),
        schema(type="object", properties={HUGE: {"$ref": f"#/$defs/{HUGE}"}}),
        schema(**{HUGE: 1}, type="string", format=HUGE),
        schema(type="string", pattern="(" + HUGE),
        chat(chat_template_kwargs={HUGE: 1, "messages": HUGE}),
        chat(logit_bias={HUGE: 1}),
        chat(reasoning_effort=HUGE),
        chat(stop=[HUGE]),
        chat(baton={"slo_class": HUGE}),
        chat(baton={HUGE: 1}),
        chat(**{HUGE: 1}),
        chat(seed=int("9" * 4000)),
        completion(suffix=HUGE),
        completion(max_tokens=int("9" * 4000)),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "encoding_format": HUGE}),
        ("/v1/load_lora_adapter", {"lora_name": HUGE, "lora_path": HUGE}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/" + HUGE}),
        ("/v1/unload_lora_adapter", {"lora_name": HUGE}),
    ],
)
async def test_no_answer_quotes_more_of_a_request_than_a_person_reads(folder, path, body):
    async with cluster(folder, FakeWorker(reply=[7], endless=True)) as c, c.http() as http:
        answer = await http.post(path, json=body)
        if answer.status_code != 200:
            assert 400 <= answer.status_code < 500, answer.text[:1000]
            assert len(answer.content) < 5000


def test_texts_of_errors_are_cut_for_logs_and_recent_requests_too():
    error = ClientError("y" * 1_000_000, param="z" * 1_000_000)
    assert len(str(error)) == MESSAGE_CHARS_MAX
    assert error.param is not None
    assert len(error.param) == PARAM_CHARS_MAX


async def test_the_openai_client_raises_its_own_errors(folder):
    async with cluster(folder, FakeWorker(reply=[7])) as c:
        client = c.openai()
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long " * 2000}]
            )
        assert too_long.value.code == "context_length_exceeded"
        assert str(CONTEXT) in str(too_long.value)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=USER)


async def test_a_prompt_may_fill_the_context_but_for_one_token(folder):
    async with cluster(folder, FakeWorker(reply=[7] * 500)) as c:
        answer = await c.openai().completions.create(model=MODEL, prompt=[7] * (CONTEXT - 1), max_tokens=1)
        assert answer.usage.total_tokens == CONTEXT
        chat = await c.openai().chat.completions.create(model=MODEL, messages=USER)
        assert (
            chat.usage.total_tokens == CONTEXT
        )  # The rest is the default, since the request sets no length.


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        (COMPLETION, "prompt", {"prompt": [7] * 60, "max_tokens": 41}),
        (COMPLETION, "prompt", {"prompt": [7] * 100, "max_tokens": 1}),
        (COMPLETION, "prompt", {"prompt": "a b c d " * 50, "max_tokens": 1}),
        (CHAT, "messages", {"messages": USER, "max_tokens": 99}),
    ],
)
async def test_what_no_worker_can_hold_is_too_long(folder, path, field, prompt):
    worker = FakeWorker(reply=[7] * 500)
    worker.hello = msgspec.structs.replace(worker.hello, max_model_tokens=100)
    async with cluster(folder, worker) as c, c.http() as http:
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 100
        answer = await http.post(path, json={"model": MODEL} | prompt)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
        assert "100 tokens" in error["message"]
        fits = await http.post(COMPLETION, json=completion(prompt=[7] * 60, max_tokens=40)[1])
        assert fits.json()["usage"]["total_tokens"] == 100


async def test_a_prompt_that_turns_out_too_long_for_every_worker_says_how_much(folder, monkeypatch):
    """The router accepts it before it knows any worker."""
    worker = FakeWorker("late", reply=[7])
    worker.hello = msgspec.structs.replace(worker.hello, max_model_tokens=50)
    joining = worker.session
    may_join = asyncio.Event()

    @contextlib.asynccontextmanager
    async def late():
        await may_join.wait()
        async with joining() as opened:
            yield opened

    worker.session = late
    async with cluster(folder, worker, waits_for_workers=False) as c, c.http() as http:
        submitted = called(monkeypatch, c.driver, "submit")
        asking = asyncio.create_task(http.post(COMPLETION, json=completion(prompt=[7] * 80)[1]))
        await soon(submitted)
        may_join.set()
        answer = await asking
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400,
            "prompt",
            "context_length_exceeded",
        )
        assert "more than 50" in error["message"]
        assert "80" in error["message"]


# --- sizes ----------------------------------------------------------------------------------------


async def test_a_body_over_the_limit_is_refused_from_its_header_alone(folder):
    async with cluster(folder, body_bytes_max=1000) as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_an_endless_body_is_refused_where_the_limit_is(folder):
    async def endless():
        for _ in range(500):
            yield b" " * 1000

    async with cluster(folder, body_bytes_max=1000) as c, c.http() as http:
        answer = await http.post(CHAT, content=endless())
        assert answer.status_code == 413
        assert "1000" in answer.json()["error"]["message"]
        assert answer.headers["connection"] == "close"


async def test_a_large_body_within_the_limit_is_read(folder):
    async with cluster(folder) as c, c.http() as http:
        answer = await http.post(CHAT, content=b" " * 4_000_000)
        assert answer.status_code == 400


# --- what is not the client's fault ---------------------------------------------------------------


async def test_a_full_queue_is_503(folder):
    async with cluster(folder, queue_requests_max=0) as c, c.http() as http:
        answer = await http.post(CHAT, json=chat()[1])
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        with pytest.raises(openai.InternalServerError):
            await c.openai().chat.completions.create(model=MODEL, messages=USER)


async def test_a_deadline_is_504(folder):
    worker = FakeWorker(reply=[7])
    worker.gate.clear()
    async with cluster(folder, worker, request_timeout_s=0.1) as c, c.http() as http:
        answer = await http.post(CHAT, json=chat()[1])
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        await c.nothing_in_flight()
        assert len(worker.cancelled) == len(worker.started)  # It may be placed in time or not.


async def test_a_deadline_in_mid_stream_is_an_error_event_without_done(folder):
    async with cluster(folder, FakeWorker(reply=[70]), request_timeout_s=2.0) as c, c.http() as http:
        c.worker.endless = True
        async with http.stream("POST", CHAT, json=chat(stream=True, max_tokens=200)[1]) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            c.worker.gate.clear()
            events = [line async for line in lines if line]
        assert orjson.loads(events[-1][6:])["error"]["type"] == "timeout_error"
        assert "data: [DONE]" not in events


async def test_attempts_run_out_as_503(folder):
    class Broken(FakeWorker):
        async def _generate(self, key, start):
            self.running.pop(key)
            self.tell(SequenceFailed(*key, FailureReason.INTERNAL, "it broke"))
            self._notify()

    async with cluster(folder, Broken(), attempts_max=2) as c, c.http() as http:
        answer = await http.post(CHAT, json=chat()[1])
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


async def test_a_model_without_template_says_so(tmp_path):
    folder = make_folder(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    assert not Tokenizer.load(str(folder)).has_chat_template
    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        answer = await http.post(CHAT, json=chat()[1])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert (await http.post(COMPLETION, json=completion()[1])).status_code == 200


def test_no_two_seeds_become_one():
    seeds = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1]
    used = [check_seed(seed) for seed in seeds]
    assert len(set(used)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in used)
