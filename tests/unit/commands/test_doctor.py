import httpx
import pytest

from baton.core.errors import SetupError
from baton.core.messages import INFO_NOTE, Role
from baton.wire.link import LinkBroken
from baton.wire.services import WorkerStatusReply
from commands import doctor
from commands.doctor import KnownWorker, diagnose, examine

HEALTH = {"status": "ok", "model": "m", "directory": "current"}


def worker(role, *, fingerprint="f", answers=True, indexed_blocks=0, notes=(), **accounts):
    name = f"{role}-0.a"
    names = {key.replace("__", "."): float(value) for key, value in accounts.items()}
    status = WorkerStatusReply(name, role, False, fingerprint, names, notes) if answers else None
    return KnownWorker(name, role, "h:1", False, indexed_blocks, status)


def bad(health, workers):
    return [f.text for f in diagnose(health, workers) if f.level == "bad"]


def texts(workers):
    return "\n".join(f"{f.level}: {f.text}" for f in diagnose(HEALTH, workers))


def test_a_cluster_that_moves_kv_is_well():
    workers = [
        worker(Role.PREFILL, step_tokens__prefill=100, prefix_hit_tokens=32, indexed_blocks=3),
        worker(Role.DECODE, transfer__nixl__bytes_read=2**20, transfer__tcp__bytes_read=0),
    ]
    assert bad(HEALTH, workers) == []
    said = texts(workers)
    assert "ok: remote prefill is in use: 1.0 MiB by nixl" in said
    assert "3 cached blocks" in said
    assert "32 prompt tokens" in said


def test_transfers_that_fail_and_different_fingerprints_are_bad():
    workers = [
        worker(Role.PREFILL, step_tokens__prefill=100),
        worker(Role.DECODE, fingerprint="g", transfer__nixl__bytes_read=0, transfer__nixl__reads_failed=3),
    ]
    found = bad(HEALTH, workers)
    assert any("no KV has moved" in text for text in found)
    assert any("fingerprints differ" in text for text in found)


def test_ranks_are_told_where_workers_have_several():
    workers = [worker(Role.PREFILL, rank_count=2), worker(Role.PREFILL, rank_count=2)]
    assert "ok: 2 prefill workers, of 2 ranks each" in texts(workers)
    mixed = [worker(Role.DECODE, rank_count=2), worker(Role.DECODE, rank_count=1)]
    assert "ok: 2 decode workers, of 1 and 2 ranks" in texts(mixed)
    assert "ok: 1 decode worker, of 4 ranks\n" in texts([worker(Role.DECODE, rank_count=4)])
    assert "ok: 1 decode worker\n" in texts([worker(Role.DECODE, rank_count=1)])


def test_context_ranks_are_seen_to_work():
    ranks = {"rank_count": 2, "context_rank_count": 2, "step_tokens__prefill": 900}
    assert "ok: context ranks are in use: 400 tokens" in texts(
        [worker(Role.PREFILL, **ranks, context_rank_tokens=400)]
    )
    assert "note: no step was divided over context ranks" in texts([worker(Role.PREFILL, **ranks)])
    one = worker(Role.PREFILL, context_rank_count=1, step_tokens__prefill=900)
    assert "context ranks" not in texts([one])


def test_missing_pools_and_silent_workers_are_bad():
    found = bad(
        {**HEALTH, "status": "unavailable", "directory": "away"}, [worker(Role.DECODE, answers=False)]
    )
    assert any("no worker can prefill" in text for text in found)
    assert any("does not answer" in text for text in found)
    assert any("away" in text for text in found)


def test_an_unused_cluster_is_noted_and_not_blamed():
    workers = [worker(Role.PREFILL), worker(Role.DECODE, transfer__nixl__bytes_read=0)]
    assert bad(HEALTH, workers) == []
    assert "note: no KV has moved yet" in texts(workers)


def test_a_pool_that_the_other_stands_in_for_is_noted_and_not_blamed():
    degraded = {**HEALTH, "status": "degraded"}
    for there, missing in ((Role.DECODE, "prefill"), (Role.PREFILL, "decode")):
        workers = [worker(there, step_tokens__prefill=100)]
        assert bad(degraded, workers) == []
        said = [f.text for f in diagnose(degraded, workers) if f.level == "note"]
        assert f"no {missing} worker: everything is served on the {there} pool, degraded" in said
        assert f"no worker can {missing}" in bad({**HEALTH, "status": "unavailable"}, workers)


def test_what_a_worker_left_out_is_said_with_its_reason():
    reason = "KV transfer without nixl: no such plugin"
    prefill, decode = worker(Role.PREFILL, notes=(reason,)), worker(Role.DECODE, notes=(reason,))
    assert texts([prefill, decode]).count(reason) == 1
    assert f"note: all workers: {reason}" in texts([prefill, decode])
    kernels = worker(Role.PREFILL, notes=(INFO_NOTE + "kernels: native",))
    assert "ok: all workers: kernels: native" in texts([kernels])
    assert f"note: prefill-0.a: {reason}" in texts([prefill, worker(Role.DECODE)])


def test_the_store_is_seen_to_work_or_said_not_to():
    assert "note: no KV store" in texts([worker(Role.AGGREGATED)])
    idle = texts([worker(Role.AGGREGATED, store__joined=1, store__written_blocks=5)])
    assert "note: the KV store has 5 blocks of these workers; none has been loaded yet" in idle
    used = {"store__joined": 1, "store__written_blocks": 5, "store__loaded_blocks__host": 3}
    said = texts([worker(Role.PREFILL, **used, store__loaded_blocks__ssd=2), worker(Role.DECODE)])
    assert "note: 1 of 2 workers have a KV store" in said
    assert "ok: the KV store is in use: 5 blocks written; blocks loaded: 3 from host, 2 from ssd" in said


def test_damaged_blocks_are_bad_and_late_ones_are_noted():
    workers = [worker(Role.AGGREGATED, store__joined=1, store__recomputed_blocks__corrupt=2)]
    assert any("2 blocks came damaged" in text for text in bad(HEALTH, workers))
    late = texts([worker(Role.AGGREGATED, store__joined=1, store__recomputed_blocks__late=7)])
    assert "note: 7 blocks did not arrive from the KV store in time" in late


def test_routers_that_are_heard_are_counted():
    def said(count):
        return [f"{f.level}: {f.text}" for f in diagnose({**HEALTH, "peers": count}, [])]

    assert any(text.startswith("note: peers: none known") for text in said(0))
    assert any(text.startswith("ok: peers: another router known") for text in said(1))
    assert any(text.startswith("ok: peers: 3 other routers") for text in said(3))


@pytest.mark.parametrize(
    "health",
    [
        {"error": {"message": "not found"}},
        {"status": "ok"},
        {"status": "ok", "workers": {"prefill": [{"id": "a"}]}},
        {"status": "ok", "workers": {"painter": []}},
        ["ok"],
        "ok",
        None,
    ],
)
def test_another_server_is_told_in_one_line(health, monkeypatch):
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(404, json=health))
    with pytest.raises(SetupError, match=r"^no Baton router at http://h:1: .{1,80}$"):
        examine("http://h:1")


def test_a_url_that_is_none_is_told_in_one_line():
    with pytest.raises(SetupError, match=r"^no Baton router at http://\[: "):
        examine("http://[")


@pytest.mark.parametrize("verify", [True, False])
def test_the_certificate_is_checked_unless_the_operator_says_otherwise(monkeypatch, verify):
    asked = []
    monkeypatch.setattr(httpx, "get", lambda *_, **how: asked.append(how["verify"]) or httpx.Response(404))
    with pytest.raises(SetupError):
        examine("https://h:1", verify=verify)
    assert asked == [verify]


def test_a_control_plane_that_is_silent_is_bad_only_where_experts_are_on_ranks(monkeypatch):
    def silent(*_, **__):
        raise LinkBroken("h:7000: no answer")

    monkeypatch.setattr(doctor, "look_at_experts", silent)
    for workers, level in (
        ([worker(Role.DECODE)], "note"),
        ([worker(Role.DECODE, experts__dispatched_rows=0)], "bad"),
    ):
        (finding,) = doctor._experts("http://h:1", workers, control="h:7000", key="")
        assert finding.level == level
        assert "h:7000: no answer" in finding.text
