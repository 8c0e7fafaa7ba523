"""Workers whose ranks use torch.distributed: each rank's KV is within reach of its own process only."""

import asyncio
import os
import signal

import msgspec
import psutil
import pytest

from baton.core.hashing import root_hash
from baton.core.messages import Phase, SequenceJoined
from baton.wire.client import worker_status
from tests.integration.test_far_parts import TOKENS, FarWorker
from tests.integration.test_worker_process import prompt_of, run_split, session, settled, start
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

OWN = {"engine.collectives": "torch", "transfer.backends": "tcp"}
SHAPES = ("1", "tp2", "pp2")
PAIRS = (("1", "tp2"), ("tp2", "1"), ("tp2", "pp2"), ("pp2", "tp2"))


class OwnPools(FarWorker):
    """A worker all of whose ranks are on this host. One of one rank has nothing else to choose."""

    def __init__(self, model, shape, role="aggregated", **settings):
        super().__init__(model, shape, role, own_stages=9, **{**OWN, **settings})


async def test_kv_in_pools_of_ranks_is_handed_over_in_both_directions(tmp_path):
    model = make_model(tmp_path / "m", "llama", seed=5)
    with OwnPools(model, "1") as one, OwnPools(model, "tp2") as tensor, OwnPools(model, "pp2") as stages:
        workers = dict(zip(SHAPES, (one, tensor, stages), strict=True))
        async with (
            session(one.await_ready()) as of_one,
            session(tensor.await_ready()) as of_tensor,
            session(stages.await_ready()) as of_stages,
        ):
            sessions = dict(zip(SHAPES, (of_one, of_tensor, of_stages), strict=True))
            for shape, worker in workers.items():
                sessions[shape].address = worker.address
            for number, (owner, reader) in enumerate(PAIRS):
                p, d, name = sessions[owner], sessions[reader], f"{owner} to {reader}/0"
                prompt = prompt_of(90, seed=number)  # ten tokens behind the last full block
                await run_split(p, d, name, prompt, max_tokens=TOKENS)
                await d.finished(name)
                joined = [message for message in d.of(SequenceJoined) if message.seq_id == name]
                assert joined[0].transferred_bytes > 0
                whole = start(f"whole {number}/0", Phase.AGGREGATED, prompt, of_one.hello, max_tokens=TOKENS)
                salt = root_hash(of_one.hello.fingerprint, b"whole")  # its cache has nothing of the prompt
                of_one.link.send(msgspec.structs.replace(whole, cache_root=salt))
                await of_one.finished(whole.seq_id)
                assert d.tokens(name) == of_one.tokens(whole.seq_id), f"{owner} to {reader}"
            for shape, worker in workers.items():
                accounts = await settled(worker)
                assert accounts["transfer.tcp.reads_failed"] == 0
                assert accounts["transfer.tcp.bytes_read"] > 0
                notes = (await worker_status(worker.address)).notes
                assert any("none is stored" in note for note in notes) == (shape != "1")


async def test_a_rank_that_dies_ends_its_worker(tmp_path):
    model = make_model(tmp_path / "m", "llama", seed=5)
    with OwnPools(model, "tp2") as worker:
        worker.await_ready()
        (follower,) = (
            child
            for child in psutil.Process(worker.process.pid).children()
            if "worker.stage_follower" in child.cmdline()
        )
        os.kill(follower.pid, signal.SIGKILL)
        assert await asyncio.to_thread(worker.process.wait, 30) == 1
