"""The drill's own decisions: the schedule of a seed, and that every check can fail."""

import httpx
import msgspec
import pytest

from benchmarks.chaos import checks, timeline
from benchmarks.chaos.answers import HeardAnswer, difference
from benchmarks.chaos.client import Clients
from benchmarks.chaos.outcomes import Applied, AskedRequest, ClientAttempt, End, ProcessSample, Stretch
from benchmarks.chaos.requests import KINDS, DrillRequest, asks
from benchmarks.chaos.schedule import HOSTS, PROCESSES, WORKER, Event, FaultKind, deck, draw
from loadgen.options import TrafficOptions
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.traffic import traffic_of

URL = "http://router-1"


# --- schedule -------------------------------------------------------------------------------------


def test_a_seed_repeats_its_schedule_and_another_seed_has_another():
    first, again, other = (draw(seed, length_s=600, every_s=10) for seed in (7, 7, 8))
    assert first == again
    assert [e.text for e in first] != [e.text for e in other]


@pytest.mark.parametrize("seed", range(20))
def test_events_come_in_order_within_the_drill_and_undo_what_they_name(seed):
    events = draw(seed, length_s=300, every_s=5, quiet_s=(5, 15))
    assert [e.number for e in events] == list(range(1, len(events) + 1))
    assert [e.at_s for e in events] == sorted(e.at_s for e in events)
    assert events[0].at_s >= 5
    assert events[-1].at_s <= 285
    targets = {WORKER, "", *PROCESSES, *HOSTS}
    assert all(
        e.target in targets or set(e.target.replace(">", "-").split("-")) <= set(HOSTS) for e in events
    )
    assert all(
        e.for_s > 0
        for e in events
        if e.fault in (FaultKind.FREEZE, FaultKind.CUT, FaultKind.SLOW, FaultKind.FILL_DISK)
    )
    assert all(e.amount for e in events if e.fault in (FaultKind.CLOCK, FaultKind.SLOW))


def test_half_an_hour_has_every_card_of_the_deck():
    events = draw(1, length_s=1800, every_s=15)
    drawn = {(e.fault, e.target) for e in events}
    assert {(card.fault, card.target) for card in deck()} <= drawn
    assert {fault for fault, _ in drawn} == set(FaultKind)


def test_only_the_faults_that_were_asked_for_are_drawn():
    assert {e.fault for e in draw(1, length_s=600, every_s=5, faults=(FaultKind.CUT, FaultKind.FLUSH))} == {
        FaultKind.CUT,
        FaultKind.FLUSH,
    }
    assert draw(1, length_s=600, every_s=5, faults=()) == ()


def test_a_seed_repeats_its_requests_and_all_kinds_are_among_them():
    plan = traffic_of(TrafficOptions("synth:mooncake-conversation", limit=400, length_scale="1/64")).plan()
    prompts = PromptMaker(plan, TokenRange(300, 2000), seed=0)
    first, again = (list(asks(plan, prompts, KINDS, model="m", seed=3)) for _ in range(2))
    assert first == again
    assert {ask.kind for ask in first} == set(KINDS)
    assert all(ask.body.get("seed") is not None for ask in first if ask.body.get("temperature"))


# --- answers --------------------------------------------------------------------------------------


def answer(*, text="abc", ids=(1, 2, 3), finish="length", logprobs=(-1.0,), call=None, index=0):
    heard = HeardAnswer()
    choice = {"index": index, "text": text, "token_ids": list(ids), "finish_reason": finish}
    choice["logprobs"] = {"token_logprobs": list(logprobs)}
    if call is not None:
        choice["delta"] = {"tool_calls": [{"index": 0, "function": {"name": "move", "arguments": call}}]}
    heard.hear({"choices": [choice]})
    return heard


def test_the_same_answer_in_other_pieces_is_the_same():
    pieces = HeardAnswer()
    pieces.hear({"choices": [{"index": 0, "text": "a", "token_ids": [1]}]})
    pieces.hear({"choices": [{"index": 0, "text": "bc", "token_ids": [2, 3], "finish_reason": "length"}]})
    pieces.hear({"choices": [{"index": 0, "text": "", "logprobs": {"token_logprobs": [-1.0001]}}]})
    assert difference(answer(), pieces, is_whole=True) == ""


def test_how_often_an_answer_was_placed_is_heard_from_the_server():
    heard = answer()
    heard.hear({"choices": [], "baton": {"attempts": 3}})
    assert (heard.placements, difference(answer(), heard, is_whole=True)) == (3, "")


WRONG = {
    "text": answer(text="abd"),
    "shorter text": answer(text="ab"),
    "token": answer(ids=(1, 2, 4)),
    "one token more": answer(ids=(1, 2, 3, 3)),
    "end": answer(finish="stop"),
    "log probability": answer(logprobs=(-1.1,)),
    "no log probability": answer(logprobs=()),
    "call": answer(call='{"to": "left"}'),
    "choice": answer(index=1),
    "nothing": HeardAnswer(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_found(what):
    asked = AskedRequest(0, "greedy", (attempt(End.ANSWERED, answer=WRONG[what]),))
    (finding,) = checks.check_answers({0: answer()}, [asked])
    assert finding.check == "same answers"


def test_vectors_differ_by_number_length_and_value():
    expected, same, other = (HeardAnswer(vectors=[v]) for v in ([1.0, 2.0], [1.0, 2.001], [1.0, 2.1]))
    assert difference(expected, same, is_whole=True) == ""
    for wrong in (other, HeardAnswer(vectors=[[1.0]]), HeardAnswer()):
        assert difference(expected, wrong, is_whole=True)


def test_what_came_before_an_error_must_be_the_beginning():
    good, bad = answer(text="ab", ids=(1, 2), finish=""), answer(text="ax", ids=(1, 9), finish="")
    assert difference(answer(), good, is_whole=False) == ""
    asked = AskedRequest(0, "greedy", (attempt(End.ERROR, answer=bad), attempt(End.ANSWERED)))
    assert [f.check for f in checks.check_answers({0: answer()}, [asked])] == ["same answers"]


# --- ends -----------------------------------------------------------------------------------------


def attempt(end, *, began_s=10.0, ended_s=11.0, detail="", is_final=False, pause=0.0, **more):
    heard = more.get("answer") or (answer() if end is End.ANSWERED else HeardAnswer())
    wait, pause = Stretch(began_s, began_s + 0.5), Stretch(ended_s - pause, ended_s)
    return ClientAttempt(URL, began_s, ended_s, end, detail, is_final, 0.0, wait, pause, heard)


def found(*attempts, deaths=(), sent=(0,)):
    findings = checks.check_terminal(sent, [AskedRequest(0, "greedy", attempts)], {URL: deaths})
    return sorted(f.check for f in findings)


def test_refused_and_failed_attempts_are_fine_once_there_is_an_answer():
    ends = (End.REFUSED, End.ERROR, End.NOT_CONNECTED, End.ANSWERED)
    assert found(*(attempt(end) for end in ends)) == []


def test_a_missing_answer_is_found():
    assert found(attempt(End.ANSWERED), sent=(0, 1)) == ["one end"]
    assert found(attempt(End.UNANSWERED), attempt(End.ANSWERED)) == ["one end"]
    assert found(attempt(End.GARBAGE), attempt(End.ANSWERED)) == ["one end"]
    assert found(attempt(End.REFUSED), attempt(End.ERROR)) == ["answered at last"]


def test_a_broken_connection_needs_a_router_that_died():
    broken, later = attempt(End.BROKEN), attempt(End.ANSWERED)
    assert found(broken, later, deaths=(10.5,)) == []
    assert found(broken, later, deaths=(1.0, 30.0)) == ["one end"]
    assert found(broken, later) == ["one end"]


def test_a_refusal_that_nobody_may_give_is_found():
    assert found(attempt(End.ERROR, is_final=True, detail="400: no")) == ["one end"]
    strange = attempt(End.ERROR, detail="500: b'oops', which is no error object")
    assert found(strange, attempt(End.ANSWERED)) == ["one end"]


SAID = 'data: {"choices": [{"index": 0, "text": "a\x85\u2028 b"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", [1, 7, 50, 1000])
async def test_a_stream_is_cut_at_line_feeds_only(cut):
    text = SAID.encode()

    async def answer(request):
        return httpx.Response(200, stream=Pieces([text[i : i + cut] for i in range(0, len(text), cut)]))

    clients = Clients([URL], attempts_max=1, transport=httpx.MockTransport(answer))
    ask = DrillRequest(0, 0.0, "greedy", "/v1/completions", {"stream": True})
    (attempt,) = (await clients.ask(ask, lambda _: None)).attempts
    await clients.close()
    assert attempt.end is End.ANSWERED
    assert attempt.answer.choices[0].text == "a\x85\u2028 b"


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces):
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


# --- the cluster at the end -----------------------------------------------------------------------


def test_whatever_is_held_missing_or_left_is_found():
    held = {"decode-0": {"held_blocks": 1.0, "lease_count": 0}, "router-1": {"live": 0}}
    (finding,) = checks.check_idle(held)
    assert finding.text == "decode-0: held_blocks 1"
    assert checks.check_idle({"router-1": {"live": 0}}) == []
    assert [f.text for f in checks.check_whole({"redis"})] == ["redis is not as it should be"]
    assert [f.text for f in checks.check_left_behind(["process 3"])] == ["process 3"]


def samples(rss_mib, descriptors, *, every_s=10.0):
    return [
        ProcessSample(n * every_s, "router-1", 5, int(m * 2**20), d)
        for n, (m, d) in enumerate(zip(rss_mib, descriptors, strict=True))
    ]


def test_growth_of_memory_or_descriptors_is_found():
    steady = [100.0] * 120
    grows = [100.0 + n for n in range(120)]
    assert checks.check_growth(samples(steady, [50] * 120)) == []
    assert "MiB" in checks.check_growth(samples(grows, [50] * 120))[0].text
    assert "descriptors" in checks.check_growth(samples(steady, list(range(50, 170))))[0].text
    assert checks.check_growth(samples(grows, [50] * 120, every_s=1.0)) == []  # it ran too briefly


def test_a_traceback_in_a_log_is_found_once():
    log = "all well\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\n"
    (finding,) = checks.check_logs({"router-1.log": log + log})
    assert finding.text == "router-1.log: KeyError: 'a'"
    assert checks.check_logs({"router-1.log": "all well\n"}) == []


# --- causes ---------------------------------------------------------------------------------------


def applied(fault, target, *, at_s, ended_s=None, recovered_s=None):
    end_s = at_s if ended_s is None else ended_s
    return Applied(Event(1, at_s, fault, target, end_s - at_s), "", at_s, end_s, recovered_s)


KILL = applied(FaultKind.KILL, WORKER, at_s=10.0, recovered_s=20.0)
CUT = applied(FaultKind.CUT, "first-second", at_s=14.0, ended_s=16.0, recovered_s=17.0)


def test_causes_are_the_fault_that_was_felt_before_and_those_that_came_within():
    assert timeline.cause_of([KILL, CUT], Stretch(12, 13)) == KILL.event.text
    assert timeline.cause_of([CUT, KILL], Stretch(13, 15)) == f"{KILL.event.text}, then {CUT.event.text}"
    assert timeline.cause_of([KILL, CUT], Stretch(15, 16)) == CUT.event.text
    assert timeline.cause_of([KILL, CUT], Stretch(18, 19)) == KILL.event.text
    assert timeline.cause_of([KILL, CUT], Stretch(5, 9)) == timeline.cause_of([KILL, CUT], Stretch(21, 22))
    assert timeline.cause_of([KILL, CUT], Stretch(21, 22)) == timeline.NO_FAULT


def test_the_longest_pause_names_its_request_and_cause():
    asked = [
        AskedRequest(3, "greedy", (attempt(End.ANSWERED, ended_s=12.0, pause=1.0),)),
        AskedRequest(4, "chat", (attempt(End.ANSWERED, ended_s=15.5, pause=4.0),)),
    ]
    pause = timeline.longest_pause(asked, [KILL, CUT], origin_s=10.0)
    assert (pause.request, pause.kind, pause.length_s, pause.at_s) == (4, "chat", 4.0, 1.5)
    assert pause.cause == f"{KILL.event.text}, then {CUT.event.text}"
    assert timeline.longest_pause([], [KILL], origin_s=0.0) is None


def test_errors_are_counted_by_end_text_and_fault():
    one, two = (attempt(End.ERROR, detail=f"worker {n} is lost") for n in (17, 18))
    asked = [AskedRequest(0, "greedy", (one, two, attempt(End.ANSWERED)))]
    (count,) = timeline.errors(asked, [KILL])
    assert (count.end, count.count, count.cause) == (End.ERROR, 2, KILL.event.text)


def test_a_fault_has_recovered_when_its_own_parts_are_back():
    seen = [
        (0.0, frozenset()),
        (11.0, frozenset({WORKER, "redis"})),
        (15.0, frozenset({"redis"})),
        (19.0, frozenset()),
    ]
    assert timeline.recovered_s(KILL, seen, now_s=30) == 15.0
    assert timeline.recovered_s(CUT, seen, now_s=30) == 19.0
    assert timeline.recovered_s(applied(FaultKind.KILL, "store-1", at_s=12.0), seen, now_s=30) == 12.0
    stays = [(0.0, frozenset()), (11.0, frozenset({WORKER}))]
    assert timeline.recovered_s(KILL, stays, now_s=30) is None


def test_events_and_results_can_be_written_down():
    assert msgspec.json.decode(msgspec.json.encode(KILL), type=Applied) == KILL
