"""The short way for the next tokens of an answer changes nothing but how long it takes: whatever comes, the
actions, and what the sequence becomes, are those of the whole way."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.costs import PhaseTimings
from baton.core.hashing import root_hash
from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import Phase, RefusalReason, SequenceJoined, SequenceOutput, SequenceRefused
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.steps import TokenLogprobs
from router.decisions.events import Deliver, Submit
from router.decisions.flow import Flow
from router.decisions.request_state import RequestState
from router.http.streaming import ResponseStream
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder
from tests.unit.router.script import Script

STOP, MAX_TOKENS, PROMPT = 9, 12, (1, 2, 3, 4, 5)
P, D = WorkerId("p"), WorkerId("d")
TIMINGS = PhaseTimings(0.1, 0.0, 0.2)


def output(index, *tokens, epoch=0, **more):
    return SequenceOutput(SequenceId("s"), epoch, index, tokens, **more)


def logprobs_of(tokens):
    return tuple(TokenLogprobs(token, -0.5, 1, ()) for token in tokens)


@st.composite
def outputs(draw):
    """An output a little before, at or after the next token, mostly of tokens and nothing else."""
    offset = draw(st.sampled_from([0, 0, 0, 0, -1, -2, 1]))
    tokens = tuple(draw(st.lists(st.sampled_from([5, 6, 7, 8, 5, 6, 7, 8, STOP]), max_size=2)))
    has_more = draw(st.sampled_from([None, None, None, "finish", "cached", "logprobs", "prompt", "timings"]))
    more = {
        "finish": {"finish": FinishReason.STOP},
        "cached": {"cached_token_count": 3},
        "logprobs": {"logprobs": logprobs_of(tokens)},
        "prompt": {"prompt_logprobs": logprobs_of(PROMPT[1:])},
        "timings": {"timings": TIMINGS},
    }.get(has_more, {})
    epoch_offset = draw(st.sampled_from([0, 0, 0, 0, 0, -1]))
    return draw(st.sampled_from([P, D, D, D])), offset, tokens, epoch_offset, more


OTHERS = st.sampled_from(["joined", "lost", "refused"])
EVENTS = st.lists(st.one_of(outputs(), outputs(), outputs(), outputs(), OTHERS), max_size=12)


def new_flow(phases):
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(STOP,), logprobs=1, prompt_logprobs=1)
    submit = Submit(SequenceId("s"), RequestId("r"), PROMPT, sampling, b"", 100.0)
    flow = Flow(submit, arrival=1, attempts_max=3, queue_wait_s=10.0, now_s=0.0)
    start(flow, phases, 0.0)
    return flow


def start(flow, phases, now_s):
    root = root_hash("f" * 32, b"")
    flow.start(
        phases, source=None, fingerprint="f", cache_root=root, reason="", is_fallback=False, now_s=now_s
    )


def act(flow, event, now_s, *, is_short):
    match event:
        case "joined":
            return flow.on_joined(D, SequenceJoined(SequenceId("s"), flow.epoch, 1, 0.0, 0.0), now_s=now_s)
        case "refused":
            refused = SequenceRefused(SequenceId("s"), flow.epoch, RefusalReason.NO_ROOM, "")
            return flow.on_refused(D, refused, now_s=now_s)
        case "lost":
            return flow.on_worker_lost(D, "it died", now_s=now_s)
        case worker_id, offset, tokens, epoch_offset, more:
            index = max(0, len(flow.generated) + offset)
            made = output(index, *tokens, epoch=flow.epoch + epoch_offset, **more)
            if is_short and (delivered := flow.on_next(worker_id, made, now_s=now_s)) is not None:
                return [delivered]
            return flow.on_output(worker_id, made, now_s=now_s)


def seen(flow, now_s):
    breakdown = flow.clock.latency_breakdown()
    tick_s = None if flow.is_over else flow.next_tick_s(now_s)
    return flow.state, flow.generated, flow.epoch, flow.phases, flow.cached_tokens, breakdown, tick_s


def first(worker_id):
    return worker_id, 0, (5,), 0, {"timings": TIMINGS, "cached_token_count": 3}


def following(token):
    return D, 0, (token,), 0, {}


PAIR, ALONE = {P: Phase.PREFILL, D: Phase.DECODE}, {D: Phase.AGGREGATED}


UNDER_WAY = [[], [first(D), following(6)], [first(P), "joined", following(6)]]


@settings(max_examples=1000)
@given(st.sampled_from([PAIR, ALONE]), st.sampled_from(UNDER_WAY), EVENTS)
@example(PAIR, [], [first(P), "joined", (D, -1, (5,), 0, {}), following(6), following(7)])
@example(ALONE, [], [first(D), following(6), "lost", following(7), following(8)])
@example(ALONE, [following(5), following(6)], [(D, 0, (7,), 0, {"cached_token_count": 3})])
@example(ALONE, [first(D), following(6)], [(D, 1, (), 0, {"finish": FinishReason.STOP}), following(7)])
def test_the_short_way_does_what_the_whole_way_does(phases, before, events):
    short, whole = new_flow(phases), new_flow(phases)
    for number, event in enumerate(before + events, 1):
        now_s = float(number)
        done = act(short, event, now_s, is_short=True)
        assert done == act(whole, event, now_s, is_short=False)
        assert seen(short, now_s) == seen(whole, now_s)
        if short.is_over:
            break
        if short.state is RequestState.QUEUED:
            for flow in (short, whole):
                start(flow, phases, now_s)


def test_tokens_of_an_answer_under_way_take_the_short_way():
    flow = new_flow(ALONE)
    assert flow.on_next(D, output(0, 5), now_s=1.0) is None
    flow.on_output(D, output(0, 5), now_s=1.0)
    assert flow.on_next(D, output(1, 6), now_s=2.0) is None
    flow.on_output(D, output(1, 6), now_s=2.0)
    assert flow.on_next(D, output(2, 7, 8), now_s=3.0) == Deliver(SequenceId("s"), 2, (7, 8))
    assert flow.on_next(P, output(4, 7), now_s=3.0) is None
    assert flow.on_next(D, output(4, STOP), now_s=3.0) is None
    assert flow.on_next(D, output(4, *[7] * (MAX_TOKENS - 4)), now_s=3.0) is None
    assert flow.generated == [5, 6, 7, 8]


def core_after(monkeypatch, *, is_short):
    """Return all actions of a core for an answer of 40 tokens, and its tenant's level of service."""
    took = []

    def on_next(flow, *args, **options):
        done = ON_NEXT(flow, *args, **options) if is_short else None
        took.append(done is not None)
        return done

    monkeypatch.setattr(Flow, "on_next", on_next)
    script, actions = Script(), []
    script.pair()
    sampling = SamplingParams(max_tokens=40)
    submit = Submit(SequenceId("s"), RequestId("s"), PROMPT, sampling, b"", 100.0, tenant="t", weight=2.0)
    actions += script.do(submit)
    actions += script.output("p", 0, 10)
    actions += script.joined()
    for index in range(0, 39, 3):
        actions += script.output("d", index, *range(10 + index, 13 + index))
    actions += script.output("d", 39, 49, finish=FinishReason.LENGTH)
    assert any(took) is is_short
    return actions, script.delivered, script.core._waiting._queue.shares.level("t")


ON_NEXT = Flow.on_next


def test_a_core_does_and_charges_the_same_either_way(monkeypatch):
    short, whole = core_after(monkeypatch, is_short=True), core_after(monkeypatch, is_short=False)
    assert short == whole
    assert short[1]["s"] == list(range(10, 50))


ASKED = [{}, {"return_token_ids": True}, {"stop": ["~"]}, {"n": 2}, {"echo": True}]


@pytest.mark.parametrize("fields", ASKED)
async def test_a_stream_is_the_same_either_way(tmp_path, monkeypatch, fields):
    folder = make_folder(tmp_path / "tiny")
    worker = FakeWorker(reply=list(range(20, 60)))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "stream": True, "seed": 1} | fields

    async def events(http):
        answer = await http.post("/v1/completions", json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        found = [json.loads(line) for line in lines[:-1]]
        return [{name: value for name, value in e.items() if name not in ("id", "created")} for e in found]

    def text_of(found):
        return ["".join(c["text"] for e in found for c in e["choices"] if c["index"] == i) for i in (0, 1)]

    def ids_of(found):
        return [i for e in found for c in e["choices"] for i in c.get("token_ids") or ()]

    found, plain_choice = [], ResponseStream._plain_choice

    def seen(stream):
        found.append(plain_choice(stream))
        return found[-1]

    async with cluster(folder, worker, context=1024) as c, c.http() as http:
        monkeypatch.setattr(ResponseStream, "_plain_choice", seen)
        short = await events(http)
        assert any(choice is not None for choice in found) is not ("n" in fields or "echo" in fields)
        monkeypatch.setattr(ResponseStream, "_plain_choice", lambda stream: None)
        whole = await events(http)
    assert text_of(short) == text_of(whole)
    assert ids_of(short) == ids_of(whole)
    assert [sorted(e) for e in short[:1]] == [sorted(e) for e in whole[:1]]
