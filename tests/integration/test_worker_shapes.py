"""Real workers of four shapes hand prompts to each other: the tokens are those of one worker of one rank."""

import contextlib

import msgspec
import pytest

from baton.core.hashing import root_hash
from baton.core.messages import Phase, SequenceJoined
from tests.integration.test_worker_process import (
    WorkerUnderTest,
    prompt_of,
    run_split,
    session,
    settled,
    start,
)
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SHAPES = ("1", "tp2", "pp2", "tp2pp2")
SETTINGS = {
    "model.dtype": "float32",
    "engine.kv_bytes": 4 * 2**20,
    "engine.rank_timeout_s": 60,
    "transfer.read_timeout_s": 30,
    "transfer.lease_s": 60,
}
TOKENS = 6


@contextlib.asynccontextmanager
async def cluster(model, shapes=SHAPES, **settings):
    """A session with a worker of each shape."""
    async with contextlib.AsyncExitStack() as stack:
        workers = {
            shape: stack.enter_context(
                WorkerUnderTest(model, "aggregated", **{**SETTINGS, **settings, "engine.shape": shape})
            )
            for shape in shapes
        }
        sessions = {}
        for shape, worker in workers.items():
            sessions[shape] = await stack.enter_async_context(session(worker.await_ready()))
            sessions[shape].address = worker.address
        yield workers, sessions


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {}), ("llama", {"model.kv_dtype": "int8"}), ("deepseek_v2", {}), ("mixtral", {})],
    ids=["grouped heads", "int8 KV", "latent", "mixture"],
)
async def test_every_ordered_pair_of_shapes_gives_the_tokens_of_one_rank(tmp_path, kind, settings):
    model = make_model(tmp_path / "m", kind, seed=5)
    async with cluster(model, **settings) as (workers, sessions):
        only = sessions["1"]
        for number, (owner, reader) in enumerate((o, r) for o in SHAPES for r in SHAPES if o != r):
            p, d, name = sessions[owner], sessions[reader], f"{owner} to {reader}/0"
            prompt = prompt_of(90, seed=number)  # ten tokens behind the last full block
            await run_split(p, d, name, prompt, max_tokens=TOKENS)
            await d.finished(name)
            joined = [message for message in d.of(SequenceJoined) if message.seq_id == name]
            assert joined[0].transferred_bytes > 0
            whole = start(f"whole {number}/0", Phase.AGGREGATED, prompt, only.hello, max_tokens=TOKENS)
            salt = root_hash(only.hello.fingerprint, b"whole")  # nothing of the prompt is in its cache then
            only.link.send(msgspec.structs.replace(whole, cache_root=salt))
            await only.finished(whole.seq_id)
            assert d.tokens(name) == only.tokens(whole.seq_id), f"{owner} to {reader}"
        for worker in workers.values():
            accounts = await settled(worker)
            assert accounts["transfer.cma.reads_failed"] == accounts["transfer.cma.reads_corrupt"] == 0


@pytest.mark.parametrize(
    "settings",
    [{"model.quantization": "int8", "model.kv_dtype": "int8"}, {"model.quantization": "int4"}],
    ids=["int8 weights and KV", "int4 weights"],
)
async def test_quantised_weights_give_the_tokens_of_one_rank(tmp_path, settings):
    model = make_model(tmp_path / "m", "llama", seed=5)
    prompts = [prompt_of(length, seed=3) for length in (17, 90)]
    async with cluster(model, ("1", "tp2", "pp2"), **settings) as (workers, sessions):
        found = {}
        for shape, one in sessions.items():
            for number, prompt in enumerate(prompts):
                name = f"{shape} {number}/0"
                one.link.send(start(name, Phase.AGGREGATED, prompt, one.hello, max_tokens=32))
                await one.finished(name)
                found[shape, number] = one.tokens(name)
        for number in range(len(prompts)):
            assert len(found["1", number]) == 32
            assert found["tp2", number] == found["pp2", number] == found["1", number]
        for worker in workers.values():
            await settled(worker)
