"""The story of one request, and how many are kept."""

import asyncio

import pytest

from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.recent_requests import StoriesWanted
from baton.wire.routers import stories_of
from baton.wire.server import start_server
from router.decisions.events import Note, Served, Waterfall
from router.live.recent_requests import MOMENTS_MAX, RECENT_MAX, TROUBLED_MAX, Stories
from router.openai.responses import Usage
from router.openai.timings import EdgeTimes
from router.tenants.service_classes import NO_OBJECTIVES, Objectives, Verdict

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
def stories(clock):
    return Stories(now_s=clock, unix_s=lambda: 1_000_000.0 + clock.now_s)


def note(request_id, what, **fields):
    return Note(SequenceId(f"{request_id}/0"), what, **{"because": "", **fields})


def ended(stories, request_id, verdict=Verdict.MET, outcome="completed", error=""):
    stories.begin(request_id)
    stories.end(
        request_id, outcome=outcome, error=error, verdict=verdict, objectives=NO_OBJECTIVES, tenant="default"
    )


def all_of(stories, **wanted):
    return stories.told(StoriesWanted(**wanted), ROUTER).stories


def test_of_a_request_that_runs_class_and_tenant_are_told(stories):
    stories.begin("r")
    stories.is_of("r", Objectives("interactive", 1.0, 0.1), "acme")
    stories.is_of("gone", NO_OBJECTIVES, "acme")
    (story,) = all_of(stories)
    assert (story.outcome, story.slo_class, story.tenant) == ("running", "interactive", "acme")
    assert (story.ttft_slo_s, story.tpot_slo_s) == (1.0, 0.1)


def test_a_request_is_told_with_its_moments_parts_and_objectives(stories, clock):
    stories.begin("r")
    clock.now_s += 0.5
    workers = (WorkerId("prefill-0.a"), WorkerId("decode-0.b"))
    stories.note("r", note("r", "placed", because="best chance", worker_ids=workers))
    clock.now_s += 1.5
    served = Served(workers[0], workers[1], 0.3, 0.01, 1)
    stories.answered(
        "r",
        Usage(10, 4, 8),
        ttft_s=0.7,
        tpot_s=0.02,
        edge=EdgeTimes(0.001, 0.002),
        waterfall=Waterfall(0.1, 0.0, 0.2, 0.0, 0.3, 0.05, 0.01, 0.02),
        served=served,
    )
    stories.end(
        "r",
        outcome="completed",
        error="",
        verdict=Verdict.MISSED_TTFT,
        objectives=Objectives("chat", 0.5, 0.05),
        tenant="acme",
    )
    (story,) = all_of(stories, request_id="r")
    assert (story.arrived_s, story.took_s) == (1_000_100.0, 2.0)
    assert (story.moments[0].after_s, story.moments[0].what, story.moments[0].workers) == (
        0.5,
        "placed",
        workers,
    )
    assert story.moments[0].because == "best chance"
    assert list(story.parts) == [
        "route", "tokenize", "queue", "retries", "wait", "load", "prefill", "first_hop", "transfer",
        "first_decode",
    ]  # fmt: skip
    assert story.parts["prefill"] == 0.3
    assert (story.verdict, story.slo_class, story.ttft_slo_s, story.tenant) == (
        "missed_ttft",
        "chat",
        0.5,
        "acme",
    )
    assert (story.prompt_tokens, story.completion_tokens, story.cached_tokens) == (10, 4, 8)
    assert (story.prefill_worker, story.decode_worker, story.predicted_ttft_s) == (*workers, 0.3)
    assert story.is_trouble


def test_one_that_runs_is_told_as_running(stories, clock):
    stories.begin("r")
    clock.now_s += 3
    (story,) = all_of(stories)
    assert (story.outcome, story.took_s, story.verdict, story.ttft_s) == ("running", 3.0, "", None)
    assert not story.is_trouble


def test_those_that_went_well_do_not_push_out_those_that_did_not(stories):
    ended(stories, "refused", Verdict.REFUSED_QUEUE, "refused", "the line is full")
    for i in range(2 * RECENT_MAX):
        ended(stories, f"well-{i}")
    told = all_of(stories, limit=10_000)
    assert len(told) == RECENT_MAX + 1
    (story,) = all_of(stories, request_id="refused")
    assert story.error == "the line is full"
    for i in range(2 * TROUBLED_MAX):
        ended(stories, f"failed-{i}", Verdict.FAILED, "failed")
    assert len(all_of(stories, limit=10_000)) == RECENT_MAX + TROUBLED_MAX


def test_the_newest_come_first_and_no_more_than_asked_for(stories, clock):
    for i in range(5):
        clock.now_s += 1
        ended(stories, f"r{i}")
    stories.begin("now")
    assert [s.request_id for s in all_of(stories, limit=3)] == ["now", "r4", "r3"]
    assert all_of(stories, limit=-1) == ()


def test_moments_are_bounded_and_unknown_requests_ignored(stories):
    stories.begin("r")
    for _ in range(2 * MOMENTS_MAX):
        stories.note("r", note("r", "retried"))
    stories.note("stranger", note("stranger", "placed"))
    stories.answered("stranger", Usage())
    (story,) = all_of(stories)
    assert len(story.moments) == MOMENTS_MAX


async def test_they_are_told_over_the_network(stories):
    ended(stories, "r", Verdict.FAILED, "failed", "worker lost")

    class Handler:
        async def follow(self, router_id):
            await asyncio.Event().wait()
            yield

        def stories(self, wanted):
            return stories.told(wanted, ROUTER)

    server, port = await start_server("127.0.0.1", 0, router=Handler())
    try:
        told = await stories_of(f"127.0.0.1:{port}", StoriesWanted("r"))
        assert told.router_id == ROUTER
        assert [(s.request_id, s.error) for s in told.stories] == [("r", "worker lost")]
    finally:
        await server.stop(0)
