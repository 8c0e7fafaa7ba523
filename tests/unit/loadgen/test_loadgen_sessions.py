"""Turns that wait, users who disconnect, and several sender processes, with a server on a real socket."""

import asyncio
import json
import operator
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from baton.core.errors import SetupError
from loadgen.client import parse_url, request_bytes, send
from loadgen.conversations import Conversations, continues
from loadgen.disconnects import Disconnect
from loadgen.health import ClientHealth, LoopWatch, worst_of
from loadgen.lengths import PlannedRequest, ReplayPlan
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.runner import ReplayObserver, replay_plan
from loadgen.sender_processes import SenderProcesses
from loadgen.senders import Sending, SendLimits, _shares, send_plan
from loadgen.sse import Answer, OpenAIStream
from loadgen.target import Api
from loadgen.users import Users

SILENT = ReplayObserver(lambda record: None, lambda record: None)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class ScriptedServer:
    """Streams `script(body)`, an async iterator of bytes. Records bodies, and which clients disconnected."""

    def __init__(self, script):
        self.script = script
        self.bodies = []
        self.heads = []
        self.hung_up = 0

    async def __call__(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.heads.append(head)
            self.bodies.append(body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            async for piece in self.script(body):
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up += 1
        finally:
            writer.close()


@asynccontextmanager
async def serving(script):
    app = ScriptedServer(script)
    async with await asyncio.start_server(app, "127.0.0.1", 0) as server:
        yield app, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def two_tokens(body):
    for text in ("well ", "said"):
        yield event(choices=[{"text": text, "delta": {"content": text}, "token_ids": [5]}])
    yield event(choices=[{"text": "", "finish_reason": "stop"}]) + b"data: [DONE]\n\n"


async def endless(body):
    while True:
        yield event(choices=[{"text": "a"}])
        await asyncio.sleep(0)


def request(index, at_s, **fields):
    return PlannedRequest(index, at_s, 8, 2, (), **fields)


def plain_message(server, planned):
    return request_bytes(server, "/v1/completions", json.dumps({"n": planned.index}).encode())


async def replayed(url, requests, *, stop=None, **options):
    server = parse_url(url)
    disconnects = {r.index: r.disconnect for r in requests}
    return await replay_plan(
        requests,
        lambda planned: plain_message(server, planned),
        lambda m, record: send(server, m, record, timeout_s=20, disconnect=disconnects[record.index]),
        connections_max=50,
        observer=options.pop("observer", SILENT),
        stop=stop or asyncio.Event(),
        **options,
    )


def turns(*, think_s):
    """A conversation of two turns, 10 ms apart in the trace, and an unrelated request between them."""
    return [
        request(0, 0.0, session="s"),
        request(1, 0.005),
        request(2, 0.01, session="s", turn=1, parent=0, think_s=think_s),
    ]


async def test_a_turn_waits_for_its_answer_and_nobody_else_does():
    release = asyncio.Event()

    async def slow_first(body):
        if body["n"] == 0:
            await release.wait()
        async for piece in two_tokens(body):
            yield piece

    def on_ended(record):
        if record.index == 1:
            release.set()  # the unrelated request is through: only now does the first answer come

    async with serving(slow_first) as (_, url):
        observer = ReplayObserver(lambda record: None, on_ended)
        records = await replayed(url, turns(think_s=0.02), observer=observer, wait_for_turns=True)
    first, stranger, second = (next(r for r in records if r.index == i) for i in range(3))
    assert {r.outcome for r in records} == {RequestOutcome.COMPLETED}
    assert stranger.ended_s < first.ended_s
    assert second.planned_s == pytest.approx(first.ended_s + 0.02)
    assert second.sent_s >= second.planned_s
    assert second.waited_for_turn
    assert second.trace_instant_s == pytest.approx(first.planned_s + 0.01)
    assert not first.waited_for_turn
    assert (second.session, second.turn) == ("s", 1)


async def test_open_sessions_and_early_answers_keep_the_traces_instants():
    async with serving(two_tokens) as (_, url):
        records = await replayed(url, turns(think_s=0.0))
        assert [r.index for r in records] == [0, 1, 2]
        late = [request(0, 0.0), request(1, 0.6, parent=0, think_s=0.05)]
        waited = await replayed(url, late, wait_for_turns=True)
    assert not any(r.waited_for_turn for r in [*records, *waited])
    assert waited[1].planned_s - waited[0].planned_s == pytest.approx(0.6)


async def test_a_failed_turn_does_not_end_its_conversation():
    async def broken(body):
        yield event(error={"message": "lost"})

    async with serving(broken) as (app, url):
        records = await replayed(url, turns(think_s=0.0), wait_for_turns=True)
    assert len(app.bodies) == len(records) == 3
    assert {r.error for r in records} == {ErrorKind.STREAM_ERROR}


async def test_stopping_leaves_later_turns_unsent():
    stop = asyncio.Event()

    async def until_stopped(body):
        stop.set()
        await asyncio.Event().wait()
        yield b""

    async with serving(until_stopped) as (_, url):
        records = await replayed(url, turns(think_s=0.0), wait_for_turns=True, stop=stop)
    assert 0 in [r.index for r in records]
    assert 2 not in [r.index for r in records]
    assert {r.error for r in records} == {ErrorKind.INTERRUPTED}


async def test_a_user_hangs_up_after_tokens_or_seconds():
    async def silent(body):
        if body["n"] == 0:
            async for piece in endless(body):
                yield piece
        await asyncio.Event().wait()

    plan = [
        request(0, 0.0, disconnect=Disconnect(after_tokens=3)),
        request(1, 0.0, disconnect=Disconnect(after_s=0.05)),
    ]
    async with serving(silent) as (_, url):
        tokens, seconds = sorted(await replayed(url, plan), key=lambda r: r.index)
    assert tokens.outcome is seconds.outcome is RequestOutcome.CANCELLED
    assert tokens.error is None
    assert len(tokens.token_instants_s) >= 3
    assert "tokens" in tokens.detail
    assert seconds.token_instants_s == []
    assert seconds.ended_s - seconds.planned_s >= 0.05


async def test_who_was_refused_before_hanging_up_stays_refused():
    async def refuse(reader, writer):
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        plan = [
            request(0, 0.0, disconnect=Disconnect(after_s=5.0)),
            request(1, 0.0, disconnect=Disconnect(after_tokens=1)),
        ]
        records = await replayed(url, plan)
    assert {r.outcome for r in records} == {RequestOutcome.REFUSED}


def conversation(input_tokens, ids, *, block=0):
    """Three turns of one conversation, and the lengths of their prompts."""
    requests = tuple(
        PlannedRequest(i, 0.0, n, 3, ids[i], session="s", turn=i, parent=i - 1 if i else None)
        for i, n in enumerate(input_tokens)
    )
    return ReplayPlan(requests, Fraction(block), 0, 0)


def told(text, ids=()):
    return Answer([text], list(ids))


def test_a_chat_holds_what_was_really_answered():
    plan = conversation((8, 15, 30), ((), (), ()))
    prompts = PromptMaker(plan, TokenRange(), seed=0)
    talks = Conversations(plan, prompts, Api.CHAT, remembers=True)
    one, two, three = plan.requests
    first = talks.prompt(one)
    talks.answered(0, told("yes indeed"))
    second = talks.prompt(two)
    assert second[:-1] == [*first, {"role": "assistant", "content": "yes indeed"}]
    assert len(second[-1]["content"].split()) == 15 - 8 - 3
    talks.answered(1, told("no"))
    third = talks.prompt(three)
    assert third[:-2] == second
    assert third[-2] == {"role": "assistant", "content": "no"}
    assert not talks.wants_answer(0)  # nothing is kept that no later turn needs
    assert not talks.wants_answer(2)


def test_token_prompts_continue_where_the_server_tells_ids():
    plan = conversation((8, 15, 30), ((), (), ()))
    prompts = PromptMaker(plan, TokenRange(), seed=0)
    talks = Conversations(plan, prompts, Api.COMPLETIONS, remembers=True)
    first = talks.prompt(plan.requests[0])
    talks.answered(0, told("x", [11, 12, 13]))
    second = talks.prompt(plan.requests[1])
    assert np.array_equal(second[:11], [*first, 11, 12, 13])
    assert len(second) == 15
    talks.answered(1, told("x"))  # no ids: the trace's own prompt
    assert np.array_equal(talks.prompt(plan.requests[2]), prompts.tokens(plan.requests[2]))


def test_open_sessions_send_the_traces_prompts():
    plan = conversation((8, 15), ((), ()))
    prompts = PromptMaker(plan, TokenRange(), seed=0)
    talks = Conversations(plan, prompts, Api.COMPLETIONS_TEXT, remembers=False)
    talks.prompt(plan.requests[0])
    assert not talks.wants_answer(0)
    assert talks.prompt(plan.requests[1]) == prompts.text(plan.requests[1])


@pytest.mark.parametrize(
    ("input_tokens", "ids", "does"),
    [
        ((40, 60), ((1, 2, 3), (1, 2, 8, 9)), True),  # two whole blocks, and the third only begun
        ((48, 64), ((1, 2, 3), (1, 2, 8, 9)), False),  # history rewritten
        ((40, 40), ((1, 2, 3), (1, 2, 3)), False),  # asked anew
        ((40, 60), ((), ()), True),
        ((40, 60), ((), (4, 4, 4, 4)), False),
    ],
)
def test_what_continues_a_conversation(input_tokens, ids, does):
    plan = conversation(input_tokens, ids, block=16)
    assert continues(plan, *plan.requests) is does


def test_batons_timings_reach_the_record():
    record = RequestRecord(0, 0.0)
    stream = OpenAIStream(record)
    baton = {
        "timings": {"queue_s": 0.25, "prefill_s": 1, "odd": "x"},
        "prefill_worker": "p0",
        "decode_worker": "d1",
        "predicted_ttft_s": 1.5,
        "predicted_tpot_s": None,
        "attempts": 2,
    }
    choice = {"delta": {"content": None, "reasoning_content": "hm"}, "finish_reason": "stop"}
    stream.feed(event(choices=[choice]) + event(choices=[], baton=baton) + b"data: [DONE]\n\n", now_s=1.0)
    stream.end(now_s=1.0)
    assert record.timings == {"queue_s": 0.25, "prefill_s": 1.0, "predicted_ttft_s": 1.5}
    assert (record.served_by, record.attempts) == (("p0", "d1"), 2)
    assert record.token_instants_s == [1.0]  # reasoning is tokens too
    assert record.tokens_out == 1  # the server reports no usage


def job(plan, url, **options):
    return Sending(
        plan, url, "common", "tiny", Api.COMPLETIONS, TokenRange(), 0, SendLimits(20.0, 64), **options
    )


def sessions_plan(sessions, turns_each):
    requests = []
    for index in range(sessions * turns_each):
        session, turn = index % sessions, index // sessions
        parent = index - sessions if turn else None
        requests.append(
            PlannedRequest(
                index, 0.002 * index, 8 + 6 * turn, 2, (), session=str(session), turn=turn, parent=parent,
                tenant=f"t{session % 2}",
            )
        )  # fmt: skip
    return ReplayPlan(tuple(requests), Fraction(0), 0, 0)


def test_shares_keep_conversations_together_and_lose_nothing():
    plan = sessions_plan(7, 3)
    shares = _shares(job(plan, "http://x"), 3)
    owners = [{r.session for r in share.plan.requests} for share in shares]
    assert sum(len(o) for o in owners) == len(set.union(*owners)) == 7
    assert sorted(r.index for s in shares for r in s.plan.requests) == list(range(21))
    assert [s.limits.connections_max for s in shares] == [21, 21, 21]
    assert len(_shares(job(replace(plan, requests=plan.requests[:2]), "http://x"), 5)) == 2


@contextmanager
def serving_apart(script):
    """Serve in a thread, for a client that runs an event loop of its own."""
    ready, over, found = threading.Event(), asyncio.Event(), {}

    async def serve():
        async with serving(script) as (app, url):
            found.update(app=app, url=url, loop=asyncio.get_running_loop())
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield found["app"], found["url"]
    finally:
        found["loop"].call_soon_threadsafe(over.set)
        thread.join(20)


def test_several_processes_send_what_one_would():
    """Prompts, keys, the order within conversations and all records are those of one process."""
    plan = sessions_plan(6, 3)
    users = Users(keys=(("t0", "key-zero"),))
    seen = {}
    with serving_apart(two_tokens) as (app, url):
        for clients in (1, 2):
            ended = []
            observer = ReplayObserver(lambda record: None, ended.append)
            app.bodies.clear()
            app.heads.clear()
            sent = send_plan(job(plan, url, wait_for_turns=True, users=users), observer, clients=clients)
            assert {r.outcome for r in sent.records} == {RequestOutcome.COMPLETED}
            assert sorted(r.index for r in sent.records) == sorted(r.index for r in ended) == list(range(18))
            assert sent.health.clients == clients
            assert not sent.was_stopped
            by_index = {r.index: r for r in sent.records}
            for r in plan.requests:
                if r.parent is not None:
                    assert by_index[r.index].sent_s >= by_index[r.parent].ended_s
            seen[clients] = sorted(json.dumps(b["prompt"]) for b in app.bodies)
            keys = [h.split("Bearer ")[1].split("\r\n")[0] for h in app.heads]
            assert (keys.count("key-zero"), keys.count("common")) == (9, 9)
    assert seen[1] == seen[2]


def test_stopping_several_processes_keeps_what_was_seen():
    async def silent(body):
        await asyncio.Event().wait()
        yield b""

    plan = sessions_plan(4, 1)
    late = replace(plan.requests[3], at_s=1000.0)
    plan = replace(plan, requests=(*plan.requests[:3], late))
    sent_count = []
    observer = ReplayObserver(sent_count.append, lambda record: None, lambda: len(sent_count) == 3)
    with serving_apart(silent) as (_, url):
        sent = send_plan(job(plan, url), observer, clients=2)
    assert sent.was_stopped
    assert [r.index for r in sent.records] == [0, 1, 2]
    assert {r.error for r in sent.records} == {ErrorKind.INTERRUPTED}


async def test_a_sending_process_that_dies_is_an_error():
    processes = SenderProcesses([1, 2], operator.is_, SILENT, timeout_s=60)  # it ends without a message
    try:
        with pytest.raises(SetupError, match="ended before"):
            await processes.run()
    finally:
        processes.close()


async def test_a_blocked_event_loop_is_noticed():
    async with LoopWatch() as watch:
        until = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.15, until.set_result, None)
        began = time.monotonic()
        while time.monotonic() - began < 0.12:
            pass  # as a slow client would
        await until
        health = watch.health()
    assert health.loop_lag_max_s > 0.05
    late = [RequestRecord(0, planned_s=1.0, sent_s=1.5), RequestRecord(1, planned_s=1.0)]
    worst = worst_of([health, health], late)
    assert worst.clients == 2
    assert worst.lateness_p99_s == 0.5
    warnings = worst.warnings()
    assert any("500 ms late" in w for w in warnings)
    assert ClientHealth(1, 0.001, 0.001, 0.5, 0.3, 0.1).warnings() == []
