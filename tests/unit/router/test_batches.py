"""Files and batches of a real router: what is kept, what a restart finds, bounds, other tenants."""

import asyncio
import json

import openai
import pytest

from router.batches.folder import StateFolder
from router.batches.lines import check_lines, done_ids, result_line
from router.batches.records import BatchBounds, BatchRecord, FileRecord
from router.batches.slots import FairSlots
from router.http.batch_runner import BatchRunner
from router.tenants.key_files import write_file
from router.tenants.keys import KeyBook, KeyRecord, Tenant, digest_of, new_key
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, MODEL, FakeWorker, cluster, make_folder

BOUNDS = BatchBounds(1000, 3000, 3, 10, 2, 100.0)
URL = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def spell(folder):
    tokenizer = Tokenizer.load(str(folder))
    return lambda text: tokenizer._rust.encode(text, add_special_tokens=False).ids


def line(custom_id, **body):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


async def made(client, lines):
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")


async def over(client, batch):
    async with asyncio.timeout(BOUND_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client, file_id):
    text = (await client.files.content(file_id)).text
    return {found["custom_id"]: found for found in map(json.loads, text.splitlines())}


async def test_good_requests_are_answered_and_wrong_ones_told(folder, spell, tmp_path):
    worker = FakeWorker(reply=spell("ab"))
    async with cluster(folder, worker, files_dir=str(tmp_path / "f")) as c:
        client = c.openai()
        batch = await over(client, await made(client, [line("a"), line("b", temperature=9), line("c")]))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
        assert good.keys() == {"a", "c"}
        assert good["a"]["response"]["body"]["choices"][0]["text"] == "ab"
        assert bad["b"]["response"]["body"]["error"]["param"] == "temperature"
        # Requests of batches go behind those that somebody waits for.
        assert {start.priority for start in worker.started} == {1_000_000}


async def test_a_restart_goes_on_without_asking_again(folder, spell, tmp_path):
    files = str(tmp_path / "f")
    first, stop = FakeWorker(reply=spell("ab")), asyncio.Event()
    async with cluster(folder, first, files_dir=files, batch_in_flight_max=1, stop=stop) as c:
        client = c.openai()
        batch = await made(client, [line(str(number)) for number in range(6)])
        await first.until(lambda: len(first.started) >= 3)
        first.gate.clear()
        stop.set()
    second = FakeWorker(reply=spell("ab"))
    async with cluster(folder, second, files_dir=files) as c:
        client = c.openai()
        batch = await over(client, await client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        assert batch.request_counts.completed == 6
        assert (await results(client, batch.output_file_id)).keys() == set("012345")
    assert 0 < len(second.started) < 6


async def test_a_long_batch_of_one_tenant_holds_up_none_of_another(folder, spell, tmp_path):
    path, keys = tmp_path / "keys.json", {name: new_key() for name in ("long", "short")}
    write_file(path, KeyBook({name: Tenant() for name in keys}, tuple(
        KeyRecord(digest_of(key), name) for name, key in keys.items()
    )))  # fmt: skip
    worker = FakeWorker(reply=spell("ab"))
    settings = {"files_dir": str(tmp_path / "f"), "batch_in_flight_max": 2, "keys": str(path)}
    async with cluster(folder, worker, **settings) as c:
        worker.gate.clear()
        clients = {name: c.openai(api_key=key) for name, key in keys.items()}
        long = await made(clients["long"], [line(f"l{number}") for number in range(60)])
        await worker.until(lambda: len(worker.started) == 2)
        short = await made(clients["short"], [line("s")])
        worker.gate.set()
        short = await over(clients["short"], short)
        assert short.status == "completed"
        assert (await clients["long"].batches.retrieve(long.id)).request_counts.completed < 60
        long = await over(clients["long"], long)
        assert (long.status, long.request_counts.completed) == ("completed", 60)


@pytest.mark.parametrize("error", [ValueError("a defect"), ExceptionGroup("two", [OSError("disk full")])])
async def test_a_batch_that_fails_waits_for_the_next_look(folder, tmp_path, monkeypatch, error):
    tries, is_tried = [], asyncio.Event()

    async def fail(runner, record):
        tries.append(record.batch_id)
        is_tried.set()
        raise error

    monkeypatch.setattr(BatchRunner, "_run", fail)
    async with cluster(folder, FakeWorker(), files_dir=str(tmp_path / "f")) as c:
        await made(c.openai(), [line("a")])
        await asyncio.wait_for(is_tried.wait(), BOUND_S)
        for _ in range(50):  # as many answers as would show a loop without a pause
            await c.openai().models.list()
        assert len(tries) <= 2  # the first look, and the news of the batch


async def test_slots_go_to_whoever_has_the_fewest_and_then_in_turn():
    slots, order, gates = FairSlots(2), [], {}

    async def use(name):
        async with slots.one(name[0]):
            order.append(name)
            gates[name] = asyncio.Event()
            await gates[name].wait()

    async def settled():
        for _ in range(10):
            await asyncio.sleep(0)

    tasks = {}
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
        tasks[name] = asyncio.ensure_future(use(name))
        await settled()
    assert order == ["a1", "a2"]
    tasks["b1"].cancel()
    for name in ("a1", "a2", "b2", "c1", "a3", "a4"):
        gates[name].set()
        await settled()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["a1", "a2", "b2", "a3", "c1", "a4"]
    async with asyncio.timeout(BOUND_S), slots.one("d"), slots.one("d"):
        pass


async def test_a_cancelled_batch_keeps_what_it_has(folder, spell, tmp_path):
    worker = FakeWorker(reply=spell("ab"))
    async with cluster(folder, worker, files_dir=str(tmp_path / "f"), batch_in_flight_max=1) as c:
        client = c.openai()
        worker.gate.clear()
        batch = await made(client, [line(str(number)) for number in range(6)])
        await worker.until(lambda: worker.started)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        worker.gate.set()
        batch = await over(client, batch)
        assert batch.status == "cancelled"
        assert batch.request_counts.completed < 6
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


async def test_wrong_requests_name_the_field(folder, tmp_path):
    async with cluster(folder, FakeWorker(), files_dir=str(tmp_path / "f")) as c, c.http() as http:
        client = c.openai()
        file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
        for field, value in {
            "input_file_id": "file-" + "0" * 32,
            "endpoint": "/v1/images",
            "completion_window": "1h",
            "metadata": {"a": "x" * 600},
        }.items():
            answer = await http.post("/v1/batches", json=good | {field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        for path in ("/v1/files/..%2f..%2fetc", "/v1/files/file-1", "/v1/batches/batch_1"):
            assert (await http.get(path)).status_code == 404
        answer = await http.post("/v1/files", json={})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("x", b"x"), purpose="fine-tune")
        assert refused.value.param == "purpose"


def test_wrong_lines_are_told_by_number():
    lines = [line("a"), line("a"), "{", "[]", line("b", stream=True), line("c").replace(URL, "/v1/x")]
    count, faults = check_lines([one.encode() for one in lines], URL, requests_max=10)
    assert count == 6
    assert [(fault.line, fault.param) for fault in faults] == [
        (2, "custom_id"), (3, None), (4, None), (5, "body.stream"), (6, "url"),
    ]  # fmt: skip
    assert check_lines([], URL, requests_max=10)[1][0].code == "empty_file"
    many = [line(str(number)).encode() for number in range(3)]
    assert check_lines(many, URL, requests_max=2)[1][0].code == "too_many_requests"


def a_batch(tenant="t", digits="0", **more):
    return BatchRecord("batch_" + digits * 32, tenant, URL, "file-" + "a" * 32, "24h", 0, 10**12, **more)


def test_a_line_that_a_crash_cut_off_is_written_again(tmp_path):
    folder, record = StateFolder(tmp_path, BOUNDS), a_batch()
    folder._of("t", "batches").mkdir(parents=True)
    whole = result_line("a", "r", 200, {})
    folder.append(record, "output", whole)
    path = folder.results_path(record, "output")
    path.write_bytes(whole + whole[:9])
    assert list(done_ids(folder.lines(path))) == ["a"]
    folder.append(record, "output", result_line("b", "r", 200, {}))
    assert list(done_ids(folder.lines(path))) == ["a", "b"]


def test_one_router_runs_a_batch(tmp_path):
    folder, record = StateFolder(tmp_path, BOUNDS), a_batch()
    folder._of("t", "batches").mkdir(parents=True)
    claim = folder.claim(record)
    assert folder.claim(record) is None
    claim.close()
    again = folder.claim(record)
    assert again is not None
    again.close()


def test_a_tenants_files_are_its_own_and_bounded(tmp_path):
    folder = StateFolder(tmp_path, BOUNDS)

    def add(digit, size, tenant="t", expires_at=10**12):
        file = FileRecord(f"file-{digit * 32}", "f", "batch", size, int(digit, 16), expires_at)
        path = tmp_path / "in"
        path.write_bytes(b"x" * size)
        with path.open("rb") as source:
            return folder.add_file(tenant, file, source)

    add("a", 1000)
    add("b", 1000)
    with pytest.raises(Exception, match="bytes together"):
        add("c", 1001)
    add("c", 500)
    with pytest.raises(Exception, match="at most 3 files"):
        add("d", 1)
    assert [one.file_id[5] for one in folder.files("t")] == ["c", "b", "a"]
    with pytest.raises(Exception, match="No such File"):
        folder.file("other", "file-" + "a" * 32)
    folder.add_batch(a_batch())
    with pytest.raises(Exception, match="not over"):
        folder.delete_file("t", "file-" + "a" * 32)
    folder.add_batch(a_batch(digits="1"))
    with pytest.raises(Exception, match="2 batches"):
        folder.add_batch(a_batch(digits="2"))
    add("e", 10, tenant="other", expires_at=1)
    folder.purge("other")
    assert folder.files("other") == []
