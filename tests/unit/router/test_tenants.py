"""API keys, tenants and their limits: as values, as files, and as a client meets them."""

import asyncio
import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from baton.core.budgets import Ask, Ledger, Settle, remaining
from baton.core.errors import SetupError
from baton.core.hashing import root_hash
from baton.telemetry.catalogue import SLO_REQUESTS
from commands.app import app
from commands.keys import _create_in_file, _revoke_in_file
from kv_store.directory.interface import DirectoryLost
from router.http.authentication import duration
from router.http.request import ON_LOOP_BODY_BYTES
from router.tenants import key_files
from router.tenants.budgets import LocalBudgets, SharedBudgets
from router.tenants.key_files import read_file, write_file
from router.tenants.keyring import FileSource, LiveKeys
from router.tenants.keys import KeyBook, KeyRecord, Keyring, Tenant, digest_of, new_key, read_book, salt_of
from router.text import tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
RUN = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def book_of(keys, **tenants):
    records = tuple(KeyRecord(digest_of(key), tenant) for key, tenant in keys.items())
    return KeyBook(tenants, records)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_found_by_its_digest_alone():
    key, other = new_key(), new_key()
    assert len(key) > 43
    assert key != other
    ring = Keyring(book_of({key: "a", other: "b"}, a=Tenant(), b=Tenant()))
    assert ring.tenant_of(key) == "a"
    assert ring.tenant_of(other) == "b"
    for wrong in ("", key[:-1], key + "x", "x" * 10_000, digest_of(key)):
        assert ring.tenant_of(wrong) is None


@pytest.mark.parametrize("ending", ["toml", "yaml", "json"])
def test_a_file_reads_back_as_written_and_holds_no_key(tmp_path, ending):
    key = new_key()
    tenant = Tenant(2.5, "fast", ("fast", "slow"), 60, 9000, 3, 'sa"lt', may_load_adapters=True)
    book = KeyBook(
        {"acme.eu": tenant, "plain": Tenant()}, (KeyRecord(digest_of(key), "acme.eu", "now", 'é "n"'),)
    )
    path = tmp_path / f"keys.{ending}"
    write_file(path, book)
    assert read_file(path) == book
    assert path.stat().st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    write_file(path, KeyBook())
    assert read_file(path) == KeyBook()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tenants": {"a/b": {}}}, "a/b"),
        ({"tenants": {"a": {"wieght": 1}}}, "wieght"),
        ({"tenants": {"a": {"weight": 0}}}, "weight"),
        ({"tenants": {"a": {"tokens_per_minute": -1}}}, "tokens_per_minute"),
        ({"keys": [{"sha256": "x", "tenant": "a"}]}, "64 hexadecimal"),
        ({"keys": [{"sha256": "0" * 64, "tenant": "a"}]}, "not there"),
        ({"keyz": []}, "keyz"),
    ],
)
def test_a_bad_file_is_one_line_that_names_what_is_wrong(fields, words):
    with pytest.raises(SetupError, match=words) as caught:
        read_book(fields, "keys.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("k.txt", ""), ("k.toml", "[["), ("k.yaml", "a: ["), ("k.json", "{")]
)
def test_a_file_that_is_none_is_an_error(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SetupError, match=re.escape(name)):
        read_file(tmp_path / name)


async def test_keys_follow_their_file_and_survive_a_bad_one(tmp_path):
    path, first, second = tmp_path / "keys.json", new_key(), new_key()
    write_file(path, book_of({first: "a"}, a=Tenant()))
    keys = LiveKeys(FileSource(path))
    await keys.open()
    assert keys.tenant_of(first) == ("a", Tenant())
    write_file(path, book_of({second: "b"}, b=Tenant(weight=2.0)))
    await keys.look()
    assert keys.tenant_of(first) is None
    assert keys.tenant_of(second) == ("b", Tenant(weight=2.0))
    path.write_text("{")
    await keys.look()
    assert keys.tenant_of(second) is not None
    assert "keys.json" in keys.trouble
    path.unlink()
    await keys.look()
    assert keys.tenant_of(second) is not None
    await keys.close()


async def test_a_key_that_was_revoked_while_no_request_came_is_gone_at_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "look_s", 0.01)
    path, key = tmp_path / "keys.json", new_key()
    write_file(path, book_of({key: "a"}, a=Tenant()))
    keys = LiveKeys(FileSource(path))
    await keys.open()
    try:
        assert keys.tenant_of(key) is not None
        write_file(path, book_of({}, a=Tenant()))
        async with asyncio.timeout(20):
            while keys.tenant_of(key) is not None:  # The look in the background runs in a thread.
                await asyncio.to_thread(path.stat)
    finally:
        await keys.close()


def test_the_command_makes_lists_and_revokes(tmp_path):
    path = str(tmp_path / "keys.toml")
    made = RUN.invoke(app, ["keys", "create", "acme", "--keys", path, "--note", "ci", "--set", "weight=2",
                            "--set", "slo_classes=fast,slow"])  # fmt: skip
    assert made.exit_code == 0, made.output
    key = made.output.strip()
    more = RUN.invoke(app, ["keys", "create", "acme", "--keys", path]).output.strip()
    book = read_file(tmp_path / "keys.toml")
    assert book.tenants == {"acme": Tenant(weight=2.0, slo_classes=("fast", "slow"))}
    assert Keyring(book).tenant_of(key) == "acme"
    listed = json.loads(RUN.invoke(app, ["keys", "list", "--keys", path, "--json"]).output)
    assert [one["note"] for one in listed["keys"]] == ["ci", ""]
    assert key not in str(listed)
    revoked = RUN.invoke(app, ["keys", "revoke", "--keys", path, listed["keys"][0]["id"], more])
    assert revoked.output.strip() == "2 keys revoked"
    assert read_file(tmp_path / "keys.toml").keys == ()
    wrong = RUN.invoke(app, ["keys", "revoke", "--keys", path, "nonsense"])
    assert isinstance(wrong.exception, SetupError)


def test_keys_that_many_make_at_once_are_all_there(tmp_path):
    path, many = tmp_path / "keys.json", 12
    place = ["--keys", str(path)]
    with ThreadPoolExecutor(many) as pool:
        keys = [f.result() for f in [pool.submit(_created, path, f"t{n % 3}") for n in range(many)]]
    ring = Keyring(read_file(path))
    assert [ring.tenant_of(key) for key in keys] == [f"t{n % 3}" for n in range(many)]
    ids = [r.key_id for r in read_file(path).keys]
    with ThreadPoolExecutor(many) as pool:
        list(pool.map(lambda one: _revoke_in_file(path, [one]), ids[1:]))
    assert [r.key_id for r in read_file(path).keys] == ids[:1]
    assert RUN.invoke(app, ["keys", "list", *place]).exit_code == 0
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"], "no lock stays behind"


def test_a_link_and_its_file_are_one(tmp_path, monkeypatch):
    monkeypatch.setattr(key_files, "LOCK_S", 0.0)
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "keys.json", tmp_path / "there" / "keys.json"
    link.symlink_to(file)
    with key_files.changing(link), pytest.raises(SetupError, match="somebody else"), key_files.changing(file):
        pass


def _created(path, tenant):
    key = new_key()
    _create_in_file(path, tenant, KeyRecord(digest_of(key), tenant), [])
    return key


def test_who_holds_the_keys_for_too_long_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(key_files, "LOCK_S", 0.0)
    with (
        key_files.changing(tmp_path / "keys.json"),
        pytest.raises(SetupError, match=r"somebody else has been changing .*keys.json"),
        key_files.changing(tmp_path / "keys.json"),
    ):
        pass


# --- budgets --------------------------------------------------------------------------------------


def ask(tokens=0, lease="r", **limits):
    return Ask("t", lease, 600.0, tokens, **limits)


def test_a_minutes_worth_at_once_and_then_the_rate():
    ledger = Ledger()
    grants = [ledger.take(ask(requests_per_minute=60), now_s=100.0) for _ in range(61)]
    assert [grant.is_granted for grant in grants] == [True] * 60 + [False]
    assert grants[-1].retry_after_s == pytest.approx(1.0)
    assert remaining(60, grants[29].requests_left_s) == 30
    assert not ledger.take(ask(requests_per_minute=60), now_s=100.9).is_granted
    assert ledger.take(ask(requests_per_minute=60), now_s=101.0).is_granted


def test_a_refused_request_takes_nothing():
    ledger = Ledger()
    limits = {"requests_per_minute": 2, "tokens_per_minute": 100}
    assert ledger.take(ask(90, **limits), now_s=0.0).is_granted
    refused = ledger.take(ask(90, **limits), now_s=0.0)
    assert refused.scarce == "tokens"
    assert refused.retry_after_s == pytest.approx(48.0)
    assert ledger.take(ask(10, **limits), now_s=0.0).is_granted
    assert ledger.take(ask(0, **limits), now_s=0.0).scarce == "requests"


def test_what_is_not_used_comes_back_and_what_never_fits_says_so():
    ledger = Ledger()
    assert ledger.take(ask(1000, tokens_per_minute=1000), now_s=0.0).is_granted
    ledger.settle(Settle("t", "r", 900, 1000), now_s=0.0)
    assert ledger.take(ask(900, tokens_per_minute=1000), now_s=0.0).is_granted
    assert ledger.take(ask(1001, tokens_per_minute=1000), now_s=999.0).retry_after_s == math.inf


def test_requests_at_once_end_with_their_leases():
    ledger = Ledger()
    assert ledger.take(ask(lease="a", concurrent_max=1), now_s=0.0).is_granted
    assert ledger.take(ask(lease="b", concurrent_max=1), now_s=1.0).scarce == "concurrent"
    ledger.settle(Settle("t", "a", 0, 0), now_s=1.0)
    assert ledger.take(ask(lease="b", concurrent_max=1), now_s=1.0).is_granted
    assert ledger.take(ask(lease="c", concurrent_max=1), now_s=602.0).is_granted


class Flaky(LocalBudgets):
    is_lost = False

    async def take(self, ask):
        if self.is_lost:
            raise DirectoryLost("away")
        grant = await super().take(ask)
        return type(grant)(grant.scarce, grant.retry_after_s, router_count=4)


async def test_without_the_shared_place_each_router_spends_its_part():
    shared = Flaky()
    budgets = SharedBudgets(shared)
    assert (await budgets.take(ask(requests_per_minute=8))).is_granted
    shared.is_lost = True
    granted = [(await budgets.take(ask(requests_per_minute=8))).is_granted for _ in range(4)]
    assert granted == [True, True, False, False]
    assert budgets.is_away


@pytest.mark.parametrize(("seconds", "text"), [(0.0121, "13ms"), (1.5, "1.5s"), (6.0, "6s"), (360, "6m0s")])
def test_durations_are_written_as_openai_does(seconds, text):
    assert duration(seconds) == text


# --- as a client meets it -------------------------------------------------------------------------


async def test_a_key_is_wanted_for_the_api_and_for_nothing_else(folder, tmp_path):
    path, key = tmp_path / "keys.toml", new_key()
    write_file(path, book_of({key: "acme"}, acme=Tenant()))
    async with cluster(folder, FakeWorker(reply=[9]), keys=str(path)) as c, c.http() as http:
        for headers in ({}, bearer("wrong"), {"authorization": key}):
            for answer in (
                await http.post("/v1/completions", json=ASK, headers=headers),
                await http.get("/v1/models", headers=headers),
            ):
                assert answer.status_code == 401
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for open_to_all in ("/health", "/health/live", "/metrics"):
            assert (await http.get(open_to_all)).status_code == 200
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        answer = await http.post("/v1/completions", json=ASK | {"user": "u"}, headers=bearer(key))
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers
        assert c.worker.started[-1].fairness_key == "acme\x1fu"
        load = {"lora_name": "a", "lora_path": "/x"}
        assert (await http.post("/v1/load_lora_adapter", json=load, headers=bearer(key))).status_code == 403
        early = await http.post("/v1/completions", json=ASK | {"priority": -1}, headers=bearer(key))
        assert early.json()["error"]["param"] == "priority"
        meter = c.router.models.first.observer.meter
        assert meter.value(SLO_REQUESTS, model=MODEL, slo_class="none", tenant="acme", outcome="met") == 1
        assert (await http.get("/health")).json()["tenants"] == {"keys": "current", "budgets": "own"}


async def test_tenants_never_share_kv_and_keys_of_one_do(folder, tmp_path):
    keys = {new_key(): "a", new_key(): "a", new_key(): "b"}
    path = tmp_path / "keys.toml"
    write_file(path, book_of(keys, a=Tenant(), b=Tenant()))
    async with cluster(folder, FakeWorker(reply=[9]), keys=str(path)) as c, c.http() as http:
        for key in keys:
            assert (await http.post("/v1/completions", json=ASK, headers=bearer(key))).status_code == 200
        first, same, other = (start.cache_root for start in c.worker.started)
        assert first == same != other
        assert other != root_hash("f" * 32, b"")
    assert salt_of("a", Tenant()) != salt_of("b", Tenant())
    assert salt_of("a", Tenant(salt="x")) == salt_of("b", Tenant(salt="x"))


async def test_limits_are_told_kept_and_settled(folder, tmp_path):
    path, key, free = tmp_path / "keys.json", new_key(), new_key()
    tenant = Tenant(requests_per_minute=3, tokens_per_minute=2000)
    write_file(path, book_of({key: "acme", free: "free"}, acme=tenant, free=Tenant()))
    async with cluster(folder, FakeWorker(reply=[9], endless=True), keys=str(path)) as c, c.http() as http:
        answer = await http.post("/v1/completions", json=ASK | {"max_tokens": 100}, headers=bearer(key))
        headers = answer.headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == "2"
        assert headers["x-ratelimit-reset-requests"] in ("20s", "19.999s")
        used = answer.json()["usage"]["total_tokens"]
        assert headers["x-ratelimit-limit-tokens"] == "2000"
        assert int(headers["x-ratelimit-remaining-tokens"]) == 2000 - used
        stopped = ASK | {"max_tokens": 150, "stop": ["é"], "stream": True}
        assert (await http.post("/v1/completions", json=stopped, headers=bearer(key))).status_code == 200
        assert (await http.post("/v1/completions", json=ASK, headers=bearer(key))).status_code == 200
        answer = await http.post("/v1/completions", json=ASK, headers=bearer(key))
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 15 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await http.post("/v1/completions", json=ASK, headers=bearer(free))).status_code == 200
        meter = c.router.models.first.observer.meter
        assert (
            meter.value(SLO_REQUESTS, model=MODEL, slo_class="none", tenant="acme", outcome="refused_quota")
            == 1
        )


async def test_a_request_that_nobody_read_is_its_tenants(folder, tmp_path, monkeypatch, caplog):
    path, key = tmp_path / "keys.json", new_key()
    write_file(path, book_of({key: "acme"}, acme=Tenant()))
    monkeypatch.setattr(tokenizer, "WAITING_MAX", 0)
    caplog.set_level(logging.INFO, "baton.requests")
    async with cluster(folder, FakeWorker(reply=[9]), keys=str(path)) as c, c.http() as http:
        large = ASK | {"metadata": {"a": "a" * ON_LOOP_BODY_BYTES}}
        answer = await http.post("/v1/completions", json=large, headers=bearer(key))
        assert answer.status_code == 503
        meter = c.router.models.first.observer.meter
        labels = {"model": MODEL, "slo_class": "none", "outcome": "refused_queue"}
        assert meter.value(SLO_REQUESTS, tenant="acme", **labels) == 1
        assert "tenant acme" in caplog.text


async def test_requests_at_once_are_given_back_however_they_end(folder, tmp_path):
    path, key = tmp_path / "keys.json", new_key()
    write_file(path, book_of({key: "acme"}, acme=Tenant(concurrent_max=1, tokens_per_minute=150)))
    worker = FakeWorker(reply=[9])
    async with cluster(folder, worker, keys=str(path)) as c, c.http() as http:
        worker.gate.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=ASK, headers=bearer(key)))
        await worker.until(lambda: worker.running)
        second = await http.post("/v1/completions", json=ASK, headers=bearer(key))
        assert second.status_code == 429
        assert "at once" in second.json()["error"]["message"]
        worker.gate.set()
        assert (await first).status_code == 200
        worker.refuses = "no"
        bad = await http.post("/v1/completions", json=ASK | {"max_tokens": 100}, headers=bearer(key))
        assert bad.status_code == 400
        worker.refuses = None
        large = await http.post("/v1/completions", json=ASK | {"max_tokens": 140}, headers=bearer(key))
        assert large.status_code == 200
        never = await http.post("/v1/completions", json=ASK | {"max_tokens": 200}, headers=bearer(key))
        assert never.status_code == 429
        assert "never" in never.json()["error"]["message"]
        assert "retry-after" not in never.headers


async def test_the_first_look_at_the_keys_must_succeed(folder, tmp_path):
    with pytest.raises(SetupError, match="absent"):
        async with cluster(folder, FakeWorker(), keys=str(tmp_path / "absent.json")):
            pass


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_tenant_that_is_named_twice_is_not_silently_one(tmp_path, ending):
    path = tmp_path / f"keys.{ending}"
    path.write_text('{"tenants": {"acme": {"weight": 1}, "acme": {"weight": 2}}}')
    with pytest.raises(SetupError, match=r"keys: .*acme is there twice"):
        read_file(path)
