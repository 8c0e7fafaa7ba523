"""Two real worker processes, without Ray and without a directory, driven by a test's own router."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from baton.core.errors import IncompatiblePeer
from baton.core.hashing import root_hash
from baton.core.ids import RouterId, SequenceId
from baton.core.messages import (
    CancelSequence,
    FailureReason,
    LoadReport,
    PeerHello,
    PeerRef,
    Phase,
    Role,
    SequenceFailed,
    SequenceJoined,
    SequenceRefused,
    StartSequence,
    StepOutput,
)
from baton.core.sampling import SamplingParams
from baton.core.transfer_backends import BACKENDS
from baton.wire.client import peer_session, worker_session, worker_status
from tests.models import make_model
from tests.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "engine.block_tokens": 16,
    "engine.kv_bytes": 32 * 2**20,
    "engine.step_tokens_max": 64,
    "engine.threads": 1,
    "engine.self_timing_s": 0.1,
    # A worker's first grammar loads what it needs, on cores that are busy here.
    "engine.prepare_s": 50,
    "router.queue_wait_s": 120,
    "transfer.backends": "cma,nixl,tcp",
    "transfer.checksums": True,
}
START_S = 60.0
LOST_S = 10.0
"""Seconds from the death of a KV owner to the failure of the sequence that reads from it."""
ANSWER_S = 90.0
"""Seconds for an answer on a machine that does other things, too."""


class WorkerUnderTest:
    def __init__(self, model, role, **settings):
        command = [sys.executable, "-m", "baton", "worker", "--model", str(model), "--role", role]
        for name, value in {**SETTINGS, **settings}.items():
            command += ["--set", f"{name}={value}"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self):
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"{line!r}, exit status {self.process.poll()}"
        self.address = line.split()[1]
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@contextlib.contextmanager
def workers(model, **settings):
    with (
        WorkerUnderTest(model, "prefill", **settings) as p,
        WorkerUnderTest(model, "decode", **settings) as d,
    ):
        yield p.await_ready(), d.await_ready()


class Session:
    """A router's session. It keeps everything that a worker sent, and wakes whoever waits for more."""

    def __init__(self, hello, link):
        self.hello, self.link = hello, link
        self.messages, self.more = [], asyncio.Condition()
        self.reader = asyncio.create_task(self._read())

    async def _read(self):
        with contextlib.suppress(Exception):  # the worker was killed, as the test knows
            async for message in self.link:
                async with self.more:
                    self.messages.append(message)
                    self.more.notify_all()

    async def until(self, what, timeout_s=ANSWER_S):
        async with asyncio.timeout(timeout_s), self.more:
            await self.more.wait_for(lambda: what(self.messages))
            return what(self.messages)

    def tokens(self, seq_id):
        """Tokens by generated index, because several workers may send the first one."""
        said = {}
        for message in self.of(StepOutput):
            for output in message.outputs:
                if output.seq_id == seq_id:
                    said.update(enumerate(output.tokens, output.first_index))
        return said

    async def finished(self, seq_id):
        def ended(messages):
            lost = [m for m in messages if isinstance(m, SequenceFailed | SequenceRefused)]
            assert seq_id not in {m.seq_id for m in lost}, lost
            return [
                output
                for message in messages
                if isinstance(message, StepOutput)
                for output in message.outputs
                if output.seq_id == seq_id and output.finish
            ]

        await self.until(ended)

    def of(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def session(worker, router="router-test"):
    async with worker_session(worker.address, RouterId(router)) as (hello, link):
        one = Session(hello, link)
        try:
            yield one
        finally:
            one.reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one.reader


def start(seq_id, phase, prompt, hello, *, max_tokens, source=None):
    return StartSequence(
        seq_id=SequenceId(seq_id),
        epoch=1,
        phase=phase,
        tokens=tuple(prompt),
        prompt_token_count=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_root=root_hash(hello.fingerprint, b""),
        time_left_s=60.0,
        source=source,
    )


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


async def run_split(p, d, seq_id, prompt, *, max_tokens):
    """Start both phases at once, as a router does."""
    source = PeerRef(p.hello.worker_id, p.address)
    d.link.send(start(seq_id, Phase.DECODE, prompt, d.hello, max_tokens=max_tokens, source=source))
    p.link.send(start(seq_id, Phase.PREFILL, prompt, p.hello, max_tokens=max_tokens))


async def settled(worker):
    """The accounts, once nothing is held any more."""
    async with asyncio.timeout(20.0):
        while True:
            accounts = (await worker_status(worker.address)).accounts
            if not accounts["held_blocks"]:
                return accounts
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "tiny", "llama", seed=5)


@pytest.mark.parametrize("backend", [name for name, facts in BACKENDS.items() if facts.reads_host_memory])
async def test_prefill_here_and_decode_there_gives_the_tokens_of_one_worker(model, backend):
    prompt = prompt_of(300, seed=1)
    with workers(model, **{"transfer.backends": backend}) as (prefill, decode):
        async with session(prefill) as p, session(decode) as d:
            p.address = prefill.address
            assert (p.hello.role, d.hello.role) == (Role.PREFILL, Role.DECODE)
            await run_split(p, d, "r/0", prompt, max_tokens=20)
            await d.finished("r/0")
            first = p.tokens("r/0")
            split = d.tokens("r/0")
            assert list(first) == [0]
            assert split[0] == first[0]
            assert list(split) == list(range(20))
            (joined,) = d.of(SequenceJoined)
            assert joined.transferred_bytes > 0

            d.link.send(start("whole/0", Phase.AGGREGATED, prompt, d.hello, max_tokens=20))
            await d.finished("whole/0")
            assert d.tokens("whole/0") == split
        accounts = await settled(decode)
        assert accounts[f"transfer.{backend}.bytes_read"] >= joined.transferred_bytes
        assert accounts["step_tokens.decode"] > 0
        assert (await settled(prefill))["lease_count"] == 0


async def test_what_is_kept_small_in_the_cache_still_crosses(model):
    """int8 KV: one worker and two give the same tokens. The aggregated run uses the worker that computed the
    prompt, whose KV was not transferred."""
    prompt = prompt_of(300, seed=6)
    with workers(model, **{"model.dtype": "float32", "model.kv_dtype": "int8"}) as (prefill, decode):
        async with session(prefill) as p, session(decode) as d:
            p.address = prefill.address
            await run_split(p, d, "r/0", prompt, max_tokens=40)
            await d.finished("r/0")
            (joined,) = d.of(SequenceJoined)
            assert joined.transferred_bytes > 0
            p.link.send(start("whole/0", Phase.AGGREGATED, prompt, p.hello, max_tokens=40))
            await p.finished("whole/0")
            assert p.tokens("whole/0") == d.tokens("r/0")
        accounts = await settled(decode)
        assert accounts["step_tokens.prefill"] == 0, "every prompt token was computed remotely"
        await settled(prefill)


async def test_a_killed_source_fails_the_sequence_and_the_decode_worker_goes_on(model):
    prompt = prompt_of(4000, seed=2)
    with workers(model, **{"engine.step_tokens_max": 4}) as (prefill, decode):
        async with session(decode) as d:
            async with session(prefill) as p:
                p.address = prefill.address
                await run_split(p, d, "r/0", prompt, max_tokens=20)
                # A load report from the prefill worker's first steps shows that it is at work.
                await p.until(lambda ms: [m for m in ms if isinstance(m, LoadReport) and m.step_s > 0])
                os.kill(prefill.process.pid, signal.SIGKILL)
                (failed,) = await d.until(
                    lambda ms: [m for m in ms if isinstance(m, SequenceFailed)], timeout_s=LOST_S
                )
            assert failed.seq_id == "r/0"
            assert failed.reason in (FailureReason.SOURCE_LOST, FailureReason.TRANSFER)
            d.link.send(start("next/0", Phase.AGGREGATED, prompt[:100], d.hello, max_tokens=5))
            await d.finished("next/0")
            assert len(d.tokens("next/0")) == 5
        await settled(decode)


async def test_sigterm_drains_what_runs_and_refuses_what_is_new(model):
    with WorkerUnderTest(model, "aggregated") as worker:
        worker.await_ready()
        async with session(worker) as s:
            s.link.send(start("long/0", Phase.AGGREGATED, prompt_of(64, 3), s.hello, max_tokens=200))
            await s.until(lambda _: s.tokens("long/0"))
            worker.process.send_signal(signal.SIGTERM)
            await s.until(lambda ms: [m for m in ms if isinstance(m, LoadReport) and m.is_draining])
            s.link.send(start("new/0", Phase.AGGREGATED, prompt_of(64, 4), s.hello, max_tokens=2))
            (refused,) = await s.until(lambda ms: [m for m in ms if isinstance(m, SequenceRefused)])
            assert refused.seq_id == "new/0"
            await s.finished("long/0")
            assert len(s.tokens("long/0")) == 200
        assert await asyncio.to_thread(worker.process.wait, 20) == 0


async def test_peers_of_another_fingerprint_are_refused_and_a_lost_router_is_forgotten(model):
    with WorkerUnderTest(model, "aggregated") as worker:
        worker.await_ready()
        with pytest.raises(IncompatiblePeer, match="fingerprint"):
            async with peer_session(worker.address, PeerHello("other.1", "another", ())):
                pass
        async with session(worker) as s:
            s.link.send(start("a/0", Phase.AGGREGATED, prompt_of(64, 3), s.hello, max_tokens=4000))
            await s.until(lambda _: s.tokens("a/0"))
        accounts = await settled(worker)  # its sequence is freed after the grace period
        assert accounts["router_count"] == 0
        async with session(worker, "router-2") as s:
            s.link.send(start("b/0", Phase.AGGREGATED, prompt_of(64, 3), s.hello, max_tokens=4000))
            await s.until(lambda _: s.tokens("b/0"))
            s.link.send(CancelSequence(SequenceId("b/0"), 1))
            await settled(worker)


def test_a_worker_serves_at_the_ports_of_its_pod_and_leaves_when_told(model):
    grpc, metrics = free_port(), free_port()
    ports = {"cluster.worker_port": grpc, "cluster.worker_metrics_port": metrics}
    with WorkerUnderTest(model, "aggregated", **ports) as worker:
        assert worker.await_ready().address == f"127.0.0.1:{grpc}"
        assert "baton_kv_free_blocks" in httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        command = [sys.executable, "-m", "worker.leave", worker.address, "--timeout-s", "20"]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert told.stderr.strip() == f"worker {worker.address}: empty"
        assert httpx.get(f"http://127.0.0.1:{metrics}/health").json()["status"] == "draining"
