"""`baton doctor` on expert ranks, pure and against a fake router and control plane."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from baton.core.experts import ExpertRankPhase
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Pool, ReplicaState, ReplicaStatus
from baton.wire.link import LinkBroken
from baton.wire.server import start_server
from commands import doctor_experts
from commands.doctor_experts import (
    ExpertsSeen,
    ExpertTrial,
    diagnose_experts,
    look_at_experts,
    rows_between,
)
from tests.unit.control_plane.expert_groups import group, rank

WORKER = ReplicaStatus("decode-0", "m", Role.DECODE, ReplicaState.RUNNING, 3.0, "1", WorkerId("decode-0.a1"))


def with_rows(made, more):
    ranks = tuple(msgspec.structs.replace(r, rows=r.rows + more) for r in made.ranks)
    return msgspec.structs.replace(made, ranks=ranks)


def cluster(*groups, workers=1):
    return ClusterState("x", (Pool("m", {Role.DECODE: workers}),), (WORKER,) * workers, experts=groups)


def found(before, after, *, workers=1, **trial):
    seen = ExpertsSeen(cluster(*after, workers=workers), (ExpertTrial(before, after, **trial),))
    return [f"{f.level}: {f.text}" for f in diagnose_experts(seen, is_in_use=True)]


def after_a_request(made, more=100, **options):
    return found((made,), (with_rows(made, more),), **options)


def test_a_group_that_works_is_well():
    said = after_a_request(group(single=0, replicas_min=2))
    assert (
        said
        == [
            "ok: experts, decode of m: every expert has at least 2 replicas",
            "ok: experts, decode of m: 4 of 4 expert ranks ready",
            "ok: experts, decode of m: 2 callers follow the map of epoch 7",
            "ok: experts, decode of m: rows travel, 400 were computed for a request",
            "note: experts, decode of m: ranks without a row so far: experts-decode-0",
        ][: 4 + ("ranks without" in said[-1])]
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"missing": 3, "is_ready": False}, "bad: {}: 3 of 256 experts have no replica"),
        ({"layer_count": 0, "is_ready": False}, "bad: {}: no rank has said yet how many experts"),
        ({}, "ok: {}: every expert has a replica; 192 of 256 experts have only one replica"),
        ({"wanted_ranks": 6}, "note: {}: 4 of 6 expert ranks ready: none started"),
        ({"callers": 0}, "bad: {}: no worker is connected to the map of epoch 7"),
        ({"callers": 1, "workers": 2}, "bad: {}: of 2 workers only 1 are connected to its map"),
        ({"callers": 0, "workers": 0}, "note: {}: no worker is connected"),
    ],
)
def test_what_is_missing_is_said(fields, says):
    workers = fields.get("workers", 1)
    made = group(**{name: value for name, value in fields.items() if name != "workers"})
    said = after_a_request(made, workers=workers)
    assert any(text.startswith(says.format("experts, decode of m")) for text in said), said


def test_single_replicas_are_noted_where_there_is_room_for_two():
    roomy = group(*(rank(i, slots=32) for i in range(4)))
    assert "though there is room for two of each" in "\n".join(after_a_request(roomy))


def test_ranks_that_are_not_ready_are_named():
    made = group(rank(1), rank(2, ExpertRankPhase.STARTING), wanted_ranks=2)
    assert (
        "note: experts, decode of m: 1 of 2 expert ranks ready: experts-decode-2 starting"
        in after_a_request(made)
    )
    none = group(rank(1, ExpertRankPhase.LOST))
    assert "bad: experts, decode of m: 0 of 1 expert ranks ready" in after_a_request(none)


def test_an_answer_without_rows_is_bad():
    assert found((group(),), (group(),))[-1] == (
        "bad: experts: a request was answered, and no expert rank has computed a row for it"
    )


def test_a_request_that_is_not_answered_is_bad_and_one_that_may_not_be_asked_is_noted():
    assert found((group(),), (group(),), error="status 503")[-1].startswith("bad: experts: the test request")
    said = found((group(),), (group(),), error="status 401", needs_key=True)
    assert said[-1] == "note: experts: no test request without an API key: --key or OPENAI_API_KEY"


def test_a_pool_that_had_nothing_to_do_is_noted_once():
    idle = group(*(rank(i, role=Role.PREFILL, rows=0) for i in range(2)), role=Role.PREFILL)
    said = found((group(), idle), (with_rows(group(), 5), idle))
    assert "note: experts, prefill of m: no row for the request, which another pool served; 0 so far" in said
    assert "ok: experts, decode of m: rows travel, 20 were computed for a request" in said


def test_rows_of_a_rank_that_started_meanwhile_count_from_zero():
    after = group(rank(1, rows=1005), rank(2, life="b", rows=7))
    assert rows_between((group(),), (after,)) == {"decode of m": 12}
    assert rows_between((group(rank(1, rows=50)),), (group(rank(1, rows=9)),)) == {"decode of m": 0}


def test_a_control_plane_that_was_not_found_matters_only_where_there_are_expert_ranks():
    assert list(diagnose_experts(None, is_in_use=False)) == []
    (finding,) = diagnose_experts(None, is_in_use=True)
    assert finding.level == "note"
    assert "--control" in finding.text
    assert list(diagnose_experts(ExpertsSeen(cluster(), ()), is_in_use=False)) == []


# --- a request of its own ---------------------------------------------------------------------------


class RowControl:
    """A control plane whose ranks compute when the fake router gets a request."""

    def __init__(self):
        self.groups = (group(),)

    def state(self):
        return cluster(*self.groups)

    async def changes(self):
        yield self.state()

    def order(self, order):
        raise AssertionError("the doctor orders nothing")


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.fixture
def control(loop):
    control = RowControl()
    start = start_server("127.0.0.1", 0, operate=control)
    server, port = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    control.address = f"127.0.0.1:{port}"
    yield control
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)


@pytest.fixture
def router(control):
    class RouterHandler(BaseHTTPRequestHandler):
        status, asked = 200, []

        def do_POST(self):
            body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
            RouterHandler.asked.append((self.path, body["model"], self.headers.get("authorization")))
            if self.status == 200:
                control.groups = tuple(with_rows(one, 10) for one in control.groups)
            self.send_response(self.status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), RouterHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    RouterHandler.url = f"http://127.0.0.1:{server.server_port}"
    yield RouterHandler
    server.shutdown()
    server.server_close()
    thread.join(5)


def look(control, router, *, address=None, key=""):
    return look_at_experts(router.url, ["decode-0.a1"], control=address or control.address, key=key)


def test_the_doctors_own_request_makes_rows_travel(control, router):
    seen = look(control, router, key="sk-1")
    assert router.asked == [("/v1/completions", "m", "Bearer sk-1")]
    assert "rows travel, 40 were computed" in "\n".join(
        f.text for f in diagnose_experts(seen, is_in_use=True)
    )


@pytest.mark.parametrize(("status", "needs_key"), [(401, True), (503, False)])
def test_a_refused_request_is_told_with_its_status(control, router, status, needs_key):
    router.status = status
    (trial,) = look(control, router).trials
    assert (trial.error, trial.needs_key) == (f"status {status}", needs_key)


def test_a_router_that_is_gone_is_told(control):
    class NoRouter:
        url = "http://127.0.0.1:1"

    (trial,) = look(control, NoRouter).trials
    assert trial.error
    assert not trial.needs_key


def test_without_expert_ranks_nothing_is_asked(control, router):
    control.groups = ()
    assert look(control, router).trials == ()
    assert router.asked == []


def test_a_named_control_plane_must_answer(control, router):
    with pytest.raises(LinkBroken):
        look(control, router, address="127.0.0.1:1")


def test_of_this_machines_clusters_the_one_with_the_routers_workers_is_asked(control, router, monkeypatch):
    addresses = [("127.0.0.1:1", "/run/a"), (control.address, "/run/b")]
    monkeypatch.setattr(doctor_experts, "local_clusters", lambda: iter(addresses))
    assert look_at_experts(router.url, ["decode-0.a1"], control="", key="").trials
    assert look_at_experts(router.url, ["decode-0.other"], control="", key="") is None


def test_a_group_of_one_rank_is_noted_with_what_to_do():
    said = "\n".join(after_a_request(group(rank(0))))
    assert "note: experts: all experts of decode of m are on one rank" in said
    assert "on one rank" not in "\n".join(after_a_request(group()))


def test_missing_memory_is_the_reason_why_experts_are_missing():
    made = group(missing=3, is_ready=False, lacks_memory=True)
    assert "the ranks that are there have no memory for them" in "\n".join(after_a_request(made))
