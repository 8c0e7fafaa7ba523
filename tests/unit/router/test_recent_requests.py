"""The record of one request, and the number of records kept."""

import asyncio

import pytest

from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.recent_requests import RecentRequestsQuery
from baton.wire.routers import recent_requests_of
from baton.wire.server import start_server
from router.decisions.events import LatencyBreakdown, Note, Served
from router.live.recent_requests import MOMENTS_MAX, RECENT_MAX, TROUBLED_MAX, RecentRequests
from router.openai.responses import Usage
from router.openai.timings import EdgeTimes
from router.tenants.service_classes import NO_OBJECTIVES, RequestObjectives, RequestVerdict
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

ROUTER = RouterId("router-1")


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recent_requests(clock):
    return RecentRequests(now_s=clock, unix_s=lambda: 1_000_000.0 + clock.now_s)


def note(request_id, what, **fields):
    return Note(SequenceId(f"{request_id}/0"), what, **{"reason": "", **fields})


def ended(recent_requests, request_id, verdict=RequestVerdict.MET, outcome="completed", error=""):
    recent_requests.begin(request_id)
    recent_requests.end(
        request_id, outcome=outcome, error=error, verdict=verdict, objectives=NO_OBJECTIVES, tenant="default"
    )


def all_of(recent_requests, **wanted):
    return recent_requests.reply(RecentRequestsQuery(**wanted), ROUTER).recent_requests


def test_of_a_request_that_runs_class_and_tenant_are_told(recent_requests):
    recent_requests.begin("r")
    recent_requests.classified("r", RequestObjectives("interactive", 1.0, 0.1), "acme")
    recent_requests.classified("gone", NO_OBJECTIVES, "acme")
    (record,) = all_of(recent_requests)
    assert (record.outcome, record.slo_class, record.tenant) == ("running", "interactive", "acme")
    assert (record.ttft_slo_s, record.tpot_slo_s) == (1.0, 0.1)


def test_a_request_is_told_with_its_moments_parts_and_objectives(recent_requests, clock):
    recent_requests.begin("r")
    clock.now_s += 0.5
    workers = (WorkerId("prefill-0.a"), WorkerId("decode-0.b"))
    recent_requests.note("r", note("r", "placed", reason="best chance", worker_ids=workers))
    clock.now_s += 1.5
    served = Served(workers[0], workers[1], 0.3, 0.01, 1)
    recent_requests.answered(
        "r",
        Usage(10, 4, 8),
        ttft_s=0.7,
        tpot_s=0.02,
        edge=EdgeTimes(0.001, 0.002),
        latency_breakdown=LatencyBreakdown(0.1, 0.0, 0.2, 0.0, 0.3, 0.05, 0.01, 0.02),
        served=served,
    )
    recent_requests.end(
        "r",
        outcome="completed",
        error="",
        verdict=RequestVerdict.MISSED_TTFT,
        objectives=RequestObjectives("chat", 0.5, 0.05),
        tenant="acme",
    )
    (record,) = all_of(recent_requests, request_id="r")
    assert (record.arrived_s, record.took_s) == (1_000_100.0, 2.0)
    assert (record.moments[0].after_s, record.moments[0].what, record.moments[0].workers) == (
        0.5,
        "placed",
        workers,
    )
    assert record.moments[0].reason == "best chance"
    assert list(record.parts) == [
        "route", "tokenize", "queue", "retries", "wait", "load", "prefill", "first_hop", "transfer",
        "first_decode",
    ]  # fmt: skip
    assert record.parts["prefill"] == 0.3
    assert (record.verdict, record.slo_class, record.ttft_slo_s, record.tenant) == (
        "missed_ttft",
        "chat",
        0.5,
        "acme",
    )
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (10, 4, 8)
    assert (record.prefill_worker, record.decode_worker, record.predicted_ttft_s) == (*workers, 0.3)
    assert record.is_trouble


def test_one_that_runs_is_told_as_running(recent_requests, clock):
    recent_requests.begin("r")
    clock.now_s += 3
    (record,) = all_of(recent_requests)
    assert (record.outcome, record.took_s, record.verdict, record.ttft_s) == ("running", 3.0, "", None)
    assert not record.is_trouble


def test_those_that_went_well_do_not_push_out_those_that_did_not(recent_requests):
    ended(recent_requests, "refused", RequestVerdict.REFUSED_QUEUE, "refused", "the line is full")
    for i in range(2 * RECENT_MAX):
        ended(recent_requests, f"well-{i}")
    told = all_of(recent_requests, limit=10_000)
    assert len(told) == RECENT_MAX + 1
    (record,) = all_of(recent_requests, request_id="refused")
    assert record.error == "the line is full"
    for i in range(2 * TROUBLED_MAX):
        ended(recent_requests, f"failed-{i}", RequestVerdict.FAILED, "failed")
    assert len(all_of(recent_requests, limit=10_000)) == RECENT_MAX + TROUBLED_MAX


def test_the_newest_come_first_and_no_more_than_asked_for(recent_requests, clock):
    for i in range(5):
        clock.now_s += 1
        ended(recent_requests, f"r{i}")
    recent_requests.begin("now")
    assert [s.request_id for s in all_of(recent_requests, limit=3)] == ["now", "r4", "r3"]
    assert all_of(recent_requests, limit=-1) == ()


def test_moments_are_bounded_and_unknown_requests_ignored(recent_requests):
    recent_requests.begin("r")
    for _ in range(2 * MOMENTS_MAX):
        recent_requests.note("r", note("r", "retried"))
    recent_requests.note("stranger", note("stranger", "placed"))
    recent_requests.answered("stranger", Usage())
    (record,) = all_of(recent_requests)
    assert len(record.moments) == MOMENTS_MAX


def test_many_sequences_placed_once_each_are_one_attempt(recent_requests):
    recent_requests.begin("r")
    for at in range(8):
        recent_requests.note("r", Note(SequenceId(f"r/{at}"), "placed", ""))
    assert all_of(recent_requests)[0].attempts == 1
    recent_requests.note("r", Note(SequenceId("r/3"), "fallback", ""))
    assert all_of(recent_requests)[0].attempts == 2


BEAMS = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "use_beam_search": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", BEAMS), ("/v1/embeddings", {"input": [[5, 6], [7]]})],
    ids=["beams", "embeddings"],
)
async def test_answers_of_many_sequences_have_their_usage_and_ttft(tmp_path, path, body):
    folder = make_folder(tmp_path / "tiny")
    async with cluster(folder, FakeWorker(reply=[9], vector=(1.0, 0.0))) as c, c.http() as http:
        answer = await http.post(path, json=body | {"model": MODEL})
        assert answer.status_code == 200
        usage = answer.json()["usage"]
        (record,) = all_of(c.router.models.first.observer.recent_requests)
        assert (record.attempts, record.ttft_s is not None) == (1, True)
        assert record.prompt_tokens == usage["prompt_tokens"] > 0
        assert record.completion_tokens == usage.get("completion_tokens", 0)


async def test_they_are_told_over_the_network(recent_requests):
    ended(recent_requests, "r", RequestVerdict.FAILED, "failed", "worker lost")

    class Handler:
        async def follow(self, router_id):
            await asyncio.Event().wait()
            yield

        def recent_requests(self, wanted):
            return recent_requests.reply(wanted, ROUTER)

    server, port = await start_server("127.0.0.1", 0, router=Handler())
    try:
        told = await recent_requests_of(f"127.0.0.1:{port}", RecentRequestsQuery("r"))
        assert told.router_id == ROUTER
        assert [(s.request_id, s.error) for s in told.recent_requests] == [("r", "worker lost")]
    finally:
        await server.stop(0)
