"""Several models behind one API, each served apart from the others."""

import asyncio
import contextlib
import json

import httpx
import msgspec
import openai
import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.core.messages import Role
from baton.telemetry.catalogue import SLO_REQUESTS
from router.http.client import ANYBODY
from router.process import RouterProcess, Sockets, run_router
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import BOUND_S, FakeWorker, check_driver, make_folder

CHAT, CODE = "org/chat", "code.v2"


def make_other_folder(path):
    """Write a model of another size, with one token per byte, which shares nothing with the first one."""
    make_folder(path)
    config = json.loads((path / "config.json").read_text()) | {"hidden_size": 32, "vocab_size": 300}
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|bos|>": 0, "<|eos|>": 1} | {one: i + 2 for i, one in enumerate(alphabet)}
    rust = Rust(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<|bos|>", eos_token="<|eos|>").save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {CHAT: make_folder(root / "a"), CODE: make_other_folder(root / "b")}


def worker(model, name, reply=(), *, fingerprint="f", **more):
    made = FakeWorker(name, Role.AGGREGATED, reply, **more)
    made.hello = msgspec.structs.replace(made.hello, model=model, fingerprint=fingerprint * 32)
    return made


class Cluster:
    def __init__(self, url, process, workers):
        self.url, self.process, self.workers = url, process, workers

    def http(self):
        return httpx.AsyncClient(base_url=self.url, timeout=BOUND_S)

    def openai(self):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def driver(self, model):
        return self.process.models.of(model).driver


@contextlib.asynccontextmanager
async def serving(folders, *workers, own=None, **router):
    named = {name: {"model": {"path": str(folder)}} for name, folder in folders.items()}
    for name, sections in (own or {}).items():
        named[name] |= sections
    config = Config.model_validate(
        {
            "models": named,
            "router": {"port": 0, "worker_silence_s": 60.0, "hold_above_s": 0, **router},
            "cluster": {"drain_timeout_s": BOUND_S},
        }
    )
    tokenizers = {name: Tokenizer.load(str(folder)) for name, folder in folders.items()}
    by_address = {f"{w.hello.worker_id}:1": w for w in workers}
    sockets = Sockets(config.router)
    process = RouterProcess(
        config, tokenizers, None, list(by_address), lambda address, _: by_address[address].session(), sockets
    )
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(lambda _: None, stop))
    try:
        for one in workers:
            await one.until(lambda one=one: one.is_heard)
        yield Cluster(sockets.urls[0], process, workers)
        for service in process.models:
            assert await service.driver.idle(BOUND_S)
            check_driver(service.driver)
    finally:
        for one in workers:
            one.gate.set()
        stop.set()
        async with asyncio.timeout(BOUND_S):
            await running
        sockets.close()
        await process.close()


def ask(model, prompt="Once upon a time", **more):
    return {"model": model, "prompt": prompt, "max_tokens": 3, **more}


async def first_of(tasks, count):
    """Return the sum over at least the first `count` of them."""
    done, pending = [], set(tasks)
    while len(done) < count:
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        done += [task.result() for task in finished]
    return done


async def test_the_model_field_chooses_worker_tokenizer_and_limits(folders):
    texts = {name: Tokenizer.load(str(folder)) for name, folder in folders.items()}
    replies = {name: texts[name].encode_now("baton") for name in folders}
    one, two = worker(CHAT, "a", replies[CHAT]), worker(CODE, "b", replies[CODE], fingerprint="e")
    async with serving(folders, one, two) as c, c.http() as http:
        for name, mine, other in ((CHAT, one, two), (CODE, two, one)):
            before = len(other.started)
            answer = (
                await http.post("/v1/completions", json=ask(name, max_tokens=len(replies[name])))
            ).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, "baton")
            assert mine.started[-1].tokens == texts[name].encode_now("Once upon a time")
            assert len(other.started) == before
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["max_model_len"], m["vocab_size"]) for m in listed] == [
            (CHAT, 8192, 512),
            (CODE, 128, 300),
        ]
        assert (await http.get(f"/v1/models/{CODE}")).json()["id"] == CODE
        too_long = await http.post("/v1/completions", json=ask(CODE, "x" * 500))
        assert (too_long.status_code, "128 tokens" in too_long.text) == (400, True)


async def test_a_stream_and_a_client_of_openai_work_as_with_one_model(folders):
    reply = Tokenizer.load(str(folders[CHAT])).encode_now("baton")
    two = worker(CODE, "b")
    async with serving(folders, worker(CHAT, "a", reply), two) as c, c.openai() as client:
        assert {m.id async for m in client.models.list()} == {CHAT, CODE}
        messages = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model=CHAT, messages=messages, max_tokens=len(reply), stream=True
        )
        text = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(text) == "baton"


async def test_an_unknown_model_is_openais_404_that_names_what_there_is(folders):
    async with serving(folders, worker(CHAT, "a")) as c, c.http() as http:
        for path, more in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("embeddings", {"input": "x"}),
        ):
            answer = await http.post(f"/v1/{path}", json={"model": "gpt-9", **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert CHAT in error["message"]
            assert CODE in error["message"]
        assert (await http.get("/v1/models/gpt-9")).status_code == 404
        metrics = (await http.get("/metrics")).text
        assert 'baton_requests_total{model="none",outcome="invalid"} 3.0' in metrics


async def test_bodies_that_name_no_model_are_refused_in_the_usual_words(folders):
    async with serving(folders, worker(CHAT, "a"), body_bytes_max=2000) as c, c.http() as http:
        missing = await http.post("/v1/completions", json={"prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
        broken = await http.post("/v1/completions", content=b"{")
        assert (broken.status_code, "not valid JSON" in broken.text) == (400, True)
        number = await http.post("/v1/completions", json={"model": 3, "prompt": "x"})
        assert (number.status_code, number.json()["error"]["param"]) == (400, "model")
        large = await http.post("/v1/completions", json=ask(CHAT, "x" * 3000))
        assert large.status_code == 413
        assert 'baton_requests_total{model="none",outcome="invalid"} 4.0' in (await http.get("/metrics")).text


async def test_a_model_without_workers_is_unready_and_answers_503_for_itself_alone(folders):
    async with serving(folders, worker(CHAT, "a", [10]), queue_wait_s=0.05) as c, c.http() as http:
        ready = await http.get("/health/ready")
        assert ready.status_code == 200
        assert {name: one["ready"] for name, one in ready.json()["models"].items()} == {
            CHAT: True,
            CODE: False,
        }
        assert (await http.get("/health/ready", params={"model": CODE})).status_code == 503
        assert (await http.get("/health/ready", params={"model": CHAT})).status_code == 200
        assert (await http.get("/health/ready", params={"model": "x"})).status_code == 404
        refused = await http.post("/v1/completions", json=ask(CODE))
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert (await http.post("/v1/completions", json=ask(CHAT))).status_code == 200


async def test_a_worker_that_is_lost_ends_nothing_of_another_model(folders):
    one, two = worker(CHAT, "a", [10], endless=True), worker(CODE, "b", [10])
    one.gate.clear()
    async with serving(folders, one, two) as c, c.http() as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=ask(CHAT)))
        await one.until(lambda: one.started)
        two.crash()
        await two.until(lambda: two.is_heard)  # The worker is dialled again.
        assert c.driver(CHAT).in_flight_count == 1
        one.gate.set()
        assert (await asking).status_code == 200
        assert len(one.started) == 1, "and was not placed again"


async def test_a_flood_on_one_model_does_not_refuse_another_ones_requests(folders):
    """The first model has no worker: two of its requests fill its queue, and further ones find it full."""
    two = worker(CODE, "b", [10])
    async with serving(folders, two, queue_requests_max=2) as c, c.http() as http:
        flood = [asyncio.create_task(http.post("/v1/completions", json=ask(CHAT))) for _ in range(12)]
        async with asyncio.timeout(BOUND_S):
            refused = await first_of(flood, 10)
        assert {answer.status_code for answer in refused} == {503}
        assert (c.driver(CHAT).status().queued, c.driver(CODE).status().queued) == (2, 0)
        assert (await http.post("/v1/completions", json=ask(CODE))).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert f'baton_requests_total{{model="{CHAT}",outcome="refused"}} 10.0' in metrics
        assert f'baton_requests_total{{model="{CODE}",outcome="refused"}}' not in metrics
        assert f'baton_router_queued_sequences{{model="{CHAT}"}} 2.0' in metrics
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_prompts_of_one_model_are_never_looked_for_in_anothers_index(folders):
    """Both models have the same folder and token ids, and still share no blocks."""
    same = {CHAT: folders[CHAT], "twin": folders[CHAT]}
    one, two = worker(CHAT, "a", [10]), worker("twin", "b", [10], fingerprint="e")
    async with serving(same, one, two) as c, c.http() as http:
        prompt = " ".join(str(n) for n in range(60))
        for name in (CHAT, "twin"):
            assert (await http.post("/v1/completions", json=ask(name, prompt))).status_code == 200
        (first,), (second,) = one.started, two.started
        assert first.tokens == second.tokens
        assert [w.worker_id for w in c.driver(CHAT).status().workers] == [one.hello.worker_id]
        assert c.driver(CHAT).chain_kinds != c.driver("twin").chain_kinds


async def test_each_model_has_its_own_objectives(folders):
    own = {CODE: {"slo": {"classes": {"fast": {"ttft_s": 60.0}}, "default": "fast"}}}
    async with (
        serving(folders, worker(CHAT, "a", [10]), worker(CODE, "b", [10]), own=own) as c,
        c.http() as http,
    ):
        for name in (CHAT, CODE):
            assert (await http.post("/v1/completions", json=ask(name))).status_code == 200
        unknown = await http.post("/v1/completions", json=ask(CHAT, baton={"slo_class": "fast"}))
        assert unknown.status_code == 400
        meter = c.process.models.first.observer.meter
        for name, slo_class in ((CHAT, "none"), (CODE, "fast")):
            labels = {"model": name, "slo_class": slo_class, "tenant": ANYBODY.name, "outcome": "met"}
            assert meter.value(SLO_REQUESTS, **labels) == 1


async def test_routers_tell_each_other_of_all_models_at_once(folders):
    one, two = worker(CHAT, "a", [10]), worker(CODE, "b", [10])
    for w in (one, two):
        w.gate.clear()
    async with serving(folders, one, two) as c, c.http() as http:
        peers = c.process.drivers.peers
        peers.listen(is_followed=True)
        asking = [asyncio.create_task(http.post("/v1/completions", json=ask(name))) for name in (CHAT, CODE)]
        for w in (one, two):
            await w.until(lambda w=w: w.started)
        update = peers.changes(RouterId("me"))
        assert {share.worker_id for share in update.loads} == {one.hello.worker_id, two.hello.worker_id}
        assert {s.worker_id for s in peers.snapshot(RouterId("me")).loads} == {
            s.worker_id for s in update.loads
        }
        for w in (one, two):
            w.gate.set()
        for task in asking:
            assert (await task).status_code == 200


async def test_an_adapter_is_of_a_model_that_must_be_named(folders):
    async with serving(folders, worker(CHAT, "a")) as c, c.http() as http:
        body = {"lora_name": "mine", "lora_path": "/nowhere"}
        unnamed = await http.post("/v1/load_lora_adapter", json=body)
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        other = await http.post("/v1/load_lora_adapter", json={**body, "lora_name": CODE, "model": CHAT})
        assert (other.status_code, "is taken" in other.text) == (400, True)
        nowhere = await http.post("/v1/load_lora_adapter", json={**body, "model": CODE})
        assert nowhere.status_code == 404
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 404


async def test_one_model_and_several_at_once_are_refused(folders):
    config = Config.model_validate(
        {"model": {"path": "x"}, "models": {CHAT: {"model": {"path": str(folders[CHAT])}}}}
    )
    with pytest.raises(SetupError, match="leave one out"):
        await run_router(config)
