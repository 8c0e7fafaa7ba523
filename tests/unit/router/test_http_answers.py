"""Answers to well-behaved clients, through a real server and the openai package."""

import asyncio
import contextlib

import orjson
import pytest

from baton.core.messages import Phase, Role
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, called, cluster, make_folder, soon

TEXT = "Grüße! Paris is the capital of France. 🙂🚀 Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def ids(folder):
    rust = Tokenizer.load(str(folder))._rust

    def encode(text=TEXT):
        return rust.encode(text, add_special_tokens=False).ids

    return encode


ASK = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


async def test_chat_streams_the_text_with_role_first_and_usage_last(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        stream = await c.openai().chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(ch.choices[0].delta.content or "" for ch in chunks if ch.choices) == TEXT
    assert [ch.choices[0].finish_reason for ch in chunks if ch.choices][-1] == "stop"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(ids()) + 1  # The end-of-sequence token counts, too.
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert all(ch.usage is None for ch in chunks[:-1])
    assert len({ch.id for ch in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].system_fingerprint.startswith("fp_")


async def test_streamed_and_whole_answers_agree(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        whole = await c.openai().chat.completions.create(**ASK)
        assert whole.object == "chat.completion"
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        stream = await c.openai().chat.completions.create(**ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content


async def test_prefill_and_decode_on_two_workers_make_one_answer(folder, ids):
    prefill = FakeWorker("p", Role.PREFILL, ids())
    decode = FakeWorker("d", Role.DECODE, ids())
    async with cluster(folder, prefill, decode) as c:
        answer = await c.openai().chat.completions.create(**ASK)
        assert answer.choices[0].message.content == TEXT
        assert [s.phase for s in prefill.started] == [Phase.PREFILL]
        assert [s.phase for s in decode.started] == [Phase.DECODE]


async def test_max_tokens_ends_with_length(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        for field in ("max_tokens", "max_completion_tokens"):
            answer = await c.openai().chat.completions.create(**ASK, **{field: 4})
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.completion_tokens == 4
        completion = await c.openai().completions.create(model=MODEL, prompt="x")
        assert completion.usage.completion_tokens == 16


async def test_choices_have_seeds_of_their_own(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        answer = await c.openai().chat.completions.create(**ASK, n=2, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert {choice.message.content for choice in answer.choices} == {TEXT}
        again = await c.openai().chat.completions.create(**ASK, n=2, seed=7, stream=True)
        texts = ["", ""]
        async for chunk in again:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [TEXT, TEXT]
        first, second, *rest = [s.sampling.seed for s in c.worker.started]
        assert first == 7 != second
        assert rest == [first, second]
        assert answer.usage.completion_tokens == 2 * (len(ids()) + 1)
        assert answer.usage.prompt_tokens == c.worker.started[0].prompt_token_count


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_sent_and_ends_the_work(folder, ids, stream):
    async with cluster(folder, FakeWorker(reply=ids(), endless=True, pauses_at=150)) as c:
        answer = await c.openai().chat.completions.create(
            **ASK, stop=["nowhere", "capital of"], stream=stream, max_tokens=200
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens < len(ids())
            assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert (text, reason) == (TEXT.partition("capital of")[0], "stop")
        await c.nothing_in_flight()
        assert len(c.worker.cancelled) == 1


async def test_completions_take_texts_lists_and_token_ids(folder, ids):
    prompt = ids("Once upon")
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        for prompts, count in (
            ("Once upon", 1),
            (["Once upon", "Once upon"], 2),
            (prompt, 1),
            ([prompt, prompt], 2),
        ):
            c.worker.started.clear()
            answer = await c.openai().completions.create(model=MODEL, prompt=prompts, max_tokens=100)
            assert [choice.text for choice in answer.choices] == [TEXT] * count
            assert [choice.index for choice in answer.choices] == list(range(count))
            assert [list(s.tokens) for s in c.worker.started] == [prompt] * count
            assert answer.usage.prompt_tokens == count * len(prompt)
        answer = await c.openai().completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=1)
        assert len(answer.choices) == 4
        assert answer.usage.prompt_tokens == 2


async def test_completions_stream(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        stream = await c.openai().completions.create(model=MODEL, prompt="x", stream=True, max_tokens=100)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_ignore_eos_goes_on_to_max_tokens_without_its_text(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids("abc"))) as c:
        answer = await c.openai().chat.completions.create(
            **ASK, max_tokens=20, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 20
        assert answer.choices[0].message.content == "abc"


async def test_a_chat_prompt_is_what_the_template_says(folder, ids):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        await c.openai().chat.completions.create(model=MODEL, messages=messages)
        want = "<|bos|><|system|>Be brief.<|eos|><|user|>one\ntwo<|eos|><|assistant|>"
        assert list(c.worker.started[0].tokens) == ids(want)


async def test_unknown_and_harmless_fields_pass(folder, ids):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "verbosity": "low", "service_tier": "auto",
        "logprobs": False, "parallel_tool_calls": True, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "response_format": {"type": "text"}, "tools": None, "something_new": [1],
        "top_logprobs": None,
    }  # fmt: skip
    async with cluster(folder, FakeWorker(reply=ids())) as c, c.http() as http:
        answer = await http.post("/v1/chat/completions", json=ASK | harmless)
        assert answer.status_code == 200, answer.text


async def test_a_lost_worker_is_a_pause_not_a_gap(folder, ids):
    first, second = FakeWorker("a", reply=ids()), FakeWorker("b", reply=ids())
    async with cluster(folder, first, second) as c:
        stream = await c.openai().chat.completions.create(**ASK, stream=True, max_tokens=200)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            busy = next((w for w in c.workers if w.running), None)
            if busy is not None and len(first.started) + len(second.started) == 1:
                busy.crash()
        assert text == TEXT
        assert len(first.started) + len(second.started) == 2


async def test_models_health_and_metrics(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c, c.http() as http:
        models = await c.openai().models.list()
        assert [m.id for m in models.data] == [MODEL]
        assert (await c.openai().models.retrieve(MODEL)).id == MODEL
        await c.openai().chat.completions.create(**ASK)
        ready = await http.get("/health/ready")
        assert ready.status_code == 200
        assert [w["id"] for w in ready.json()["workers"]["aggregated"]] == ["w.1"]
        assert (await http.get("/health/live")).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert f'baton_requests_total{{model="{MODEL}",outcome="completed"}} 1.0' in metrics
        assert 'baton_router_in_flight_sequences{worker="w.1"} 0.0' in metrics


async def test_not_ready_without_workers_and_503_with_retry_after(folder):
    async with cluster(folder, queue_wait_s=0.05) as c, c.http() as http:
        ready = await http.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["status"] == "unavailable"
        for stream in (False, True):
            answer = await http.post("/v1/chat/completions", json=ASK | {"stream": stream})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "overloaded_error"
            assert int(answer.headers["retry-after"]) >= 1


async def test_one_pool_empty_is_served_and_shown_as_degraded(folder, ids):
    async with cluster(folder, FakeWorker(role=Role.DECODE, reply=ids())) as c, c.http() as http:
        answer = await c.openai().chat.completions.create(**ASK)
        assert answer.choices[0].message.content == TEXT
        health = (await http.get("/health")).json()
        assert health["status"] == "degraded"
        assert health["degraded"]["prefill_pool_empty"]


async def test_every_response_has_a_request_id_and_the_log_both_of_them(folder, ids, caplog):
    caplog.set_level("INFO", "baton.requests")
    logged = {"log_requests": "all"}
    async with cluster(folder, FakeWorker(reply=ids()), telemetry=logged) as c, c.http() as http:
        mine = await http.post("/v1/chat/completions", json=ASK, headers={"x-request-id": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1"
        (line,) = [r for r in caplog.records if r.name == "baton.requests"]
        assert line.fields["client_request_id"] == "mine-1"
        assert line.fields["request_id"] == mine.json()["id"]
        for path in ("/health", "/v1/models", "/nowhere"):
            assert (await http.get(path)).headers["x-request-id"]


async def test_events_are_well_formed(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c, c.http() as http:
        answer = await http.post("/v1/chat/completions", json=ASK | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.content.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        for event in events[:-2]:
            assert event.startswith(b"data: ")
            assert orjson.loads(event[6:])["object"] == "chat.completion.chunk"


async def test_many_at_once_do_not_mix(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        client = c.openai()
        answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(40)))
        assert {a.choices[0].message.content for a in answers} == {TEXT}
        assert len({a.id for a in answers}) == 40


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_along_when_asked_for(folder, ids, stream):
    async with cluster(folder, FakeWorker(reply=ids())) as c:
        ask = {"model": MODEL, "prompt": "x", "max_tokens": 100, "extra_body": {"return_token_ids": True}}
        answer = await c.openai().completions.create(**ask, stream=stream)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        got = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
        assert got[: len(ids())] == ids()
        plain = await c.openai().completions.create(model=MODEL, prompt="x", max_tokens=100)
        assert not hasattr(plain.choices[0], "token_ids")
        assert not hasattr(plain.choices[0], "prompt_token_ids")


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_token_ids_come_along_once_for_each_choice(folder, ids, stream, beams):
    if stream and beams:
        return
    worker = FakeWorker(reply=ids())
    more = {"use_beam_search": True} if beams else {}
    async with cluster(folder, worker) as c:
        extra = {"extra_body": {"return_token_ids": True, **more}}
        ask = {"model": MODEL, "max_tokens": 20, "n": 2, "stream": stream, **extra}
        prompts = [[5, 9, 7], [8, 8]]
        answer = await c.openai().completions.create(prompt=prompts, **ask)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        told = {}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            if (found := getattr(choice, "prompt_token_ids", None)) is not None:
                assert choice.index not in told
                told[choice.index] = found
        assert told == {0: prompts[0], 1: prompts[0], 2: prompts[1], 3: prompts[1]}
        worker.started.clear()
        answer = await c.openai().chat.completions.create(messages=ASK["messages"], **ask)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        told = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
        prompt = min((one.tokens for one in worker.started), key=len)
        assert told == [list(prompt)] * (2 if stream else 1)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_waited_for_the_first_worker_has_the_fingerprint_of_those_that_follow(
    folder, ids, is_streamed, monkeypatch
):
    async def fingerprint():
        if not is_streamed:
            return (await client.chat.completions.create(**ASK)).system_fingerprint
        stream = await client.chat.completions.create(**ASK, stream=True)
        (found,) = {chunk.system_fingerprint async for chunk in stream}
        return found

    worker = FakeWorker("late", reply=ids())
    may_join, joining = asyncio.Event(), worker.session

    @contextlib.asynccontextmanager
    async def late():
        await may_join.wait()
        async with joining() as opened:
            yield opened

    worker.session = late
    async with cluster(folder, worker, waits_for_workers=False) as c:
        client = c.openai()
        submitted = called(monkeypatch, c.driver, "submit")
        held = asyncio.create_task(fingerprint())
        await soon(submitted)
        may_join.set()
        assert await held == await fingerprint()
