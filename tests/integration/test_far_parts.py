"""Workers whose KV is in part elsewhere, in processes that share only the network with the leader."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from baton.core.hashing import root_hash
from baton.core.messages import LoadReport, Phase, SequenceFailed, SequenceJoined
from tests.integration.test_worker_process import (
    LOST_S,
    ROOT,
    WorkerUnderTest,
    prompt_of,
    run_split,
    session,
    settled,
    start,
)
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SETTINGS = {
    "engine.block_tokens": 16,
    "engine.kv_bytes": 4 * 2**20,
    "engine.step_tokens_max": 64,
    "engine.threads": 1,
    "engine.self_timing_s": 0.1,
    "engine.rank_timeout_s": 60,
    "model.dtype": "float32",
    "transfer.read_timeout_s": 30,
    "transfer.lease_s": 60,
}
OWN_STAGES = {"1": 1, "tp2": 1, "pp2": 1, "tp2pp2": 1, "pp3": 2}
"""Stages beside the leader. The others are elsewhere."""
PAIRS = (("1", "pp2"), ("pp2", "1"), ("tp2", "pp2"), ("pp2", "tp2"), ("tp2pp2", "pp2"), ("pp2", "tp2pp2"))
TOKENS = 6


class FarWorker(WorkerUnderTest):
    def __init__(self, model, shape, role="aggregated", own_stages=0, **settings):
        stages = str(own_stages or OWN_STAGES[shape])
        module = [sys.executable, "-m", "tests.integration.far_worker", role, stages]
        named = {**SETTINGS, **settings, "engine.shape": shape, "model.path": model}
        self.process = subprocess.Popen(
            [*module, *(f"{name}={value}" for name, value in named.items())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self):
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"{line!r}, exit status {self.process.poll()}"
        _, self.address, *pids = line.split()
        self.far_pids = [int(pid) for pid in pids]
        return self


@contextlib.asynccontextmanager
async def cluster(model, shapes, **settings):
    """A session with a worker of each shape. They start one after the other: ten processes that start at once
    keep one another from their cores, until a rank that is not heard for a while is taken for lost."""
    async with contextlib.AsyncExitStack() as stack:
        workers, sessions = {}, {}
        for shape in shapes:
            worker = workers[shape] = stack.enter_context(FarWorker(model, shape, **settings))
            await asyncio.to_thread(worker.await_ready)
            sessions[shape] = await stack.enter_async_context(session(worker))
            sessions[shape].address = worker.address
        yield workers, sessions


@pytest.mark.parametrize(
    ("kind", "backend", "pairs"),
    [("llama", "tcp", PAIRS), ("deepseek_v2", "nixl", PAIRS[:2])],
    ids=["grouped heads over TCP", "latent over NIXL"],
)
async def test_kv_of_far_stages_is_handed_over_in_both_directions(tmp_path, kind, backend, pairs):
    model = make_model(tmp_path / "m", kind, seed=5)
    shapes = ("1", *{shape: None for pair in pairs for shape in pair if shape != "1"})
    async with cluster(model, shapes, **{"transfer.backends": backend}) as (workers, sessions):
        only = sessions["1"]
        for number, (owner, reader) in enumerate(pairs):
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
        readers = {reader for _, reader in pairs}
        for shape, worker in workers.items():
            accounts = await settled(worker)
            assert accounts[f"transfer.{backend}.reads_failed"] == 0
            assert (accounts[f"transfer.{backend}.bytes_read"] > 0) == (shape in readers)


@pytest.mark.parametrize("shape", ["pp2", "1"])
async def test_the_loss_of_a_far_part_ends_its_worker_and_what_reads_from_it(tmp_path, shape):
    """`shape` is that of the reader."""
    model = make_model(tmp_path / "m", "llama", seed=5)
    slow = {"engine.step_tokens_max": 4, "engine.kv_bytes": 32 * 2**20, "transfer.backends": "tcp"}
    with (
        FarWorker(model, "pp2", "prefill", **slow) as owner,
        FarWorker(model, shape, "decode", **slow) as reader,
    ):
        owner.await_ready()
        reader.await_ready()
        async with session(reader) as d:
            async with session(owner) as p:
                p.address = owner.address
                await run_split(p, d, "r/0", prompt_of(4000, seed=2), max_tokens=20)
                await p.until(lambda ms: [m for m in ms if isinstance(m, LoadReport) and m.step_s > 0])
                os.kill(owner.far_pids[0], signal.SIGKILL)
                (failed,) = await d.until(
                    lambda ms: [m for m in ms if isinstance(m, SequenceFailed)], timeout_s=LOST_S
                )
            assert failed.seq_id == "r/0"
            d.link.send(start("next/0", Phase.AGGREGATED, prompt_of(100, 3), d.hello, max_tokens=5))
            await d.finished("next/0")
        await settled(reader)
        assert await asyncio.to_thread(owner.process.wait, 30) == 1


async def test_a_reader_that_loses_a_far_part_ends(tmp_path):
    model = make_model(tmp_path / "m", "llama", seed=5)
    slow = {"engine.step_tokens_max": 4, "engine.kv_bytes": 32 * 2**20, "transfer.backends": "tcp"}
    slow["transfer.lease_s"] = 10  # nobody tells the owner that its reader is gone
    with (
        FarWorker(model, "1", "prefill", **slow) as owner,
        FarWorker(model, "pp2", "decode", **slow) as reader,
    ):
        owner.await_ready()
        reader.await_ready()
        async with session(reader) as d, session(owner) as p:
            p.address = owner.address
            await run_split(p, d, "r/0", prompt_of(4000, seed=2), max_tokens=20)
            await p.until(lambda ms: [m for m in ms if isinstance(m, LoadReport) and m.step_s > 0])
            os.kill(reader.far_pids[0], signal.SIGKILL)
            assert await asyncio.to_thread(reader.process.wait, 30) == 1
        await settled(owner)
