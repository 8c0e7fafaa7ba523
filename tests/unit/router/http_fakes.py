"""A real router on a real port, with fake workers that live in the test and follow its instructions."""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import msgspec
import openai

from baton.config import Config
from baton.core.ids import SeqKey, WorkerId
from baton.core.messages import (
    CancelSequence,
    LoadReport,
    Phase,
    RefusalReason,
    Role,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    Task,
    WorkerHello,
)
from baton.core.sampling import FinishReason, finish_after
from baton.core.steps import TokenLogprobs
from baton.wire.link import LinkBroken
from router.process import RouterProcess, Sockets
from router.tenants.open import open_keys
from router.text.tokenizer import Tokenizer
from tests.models import CONTEXT_TOKENS, save_tokenizer

CONTEXT = 256
MODEL = "tiny"
BOUND_S = 20.0


def make_folder(path: Path) -> Path:
    """Write the files that a router needs of a model, which are all but the weights."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path)
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": CONTEXT_TOKENS,
                "vocab_size": 512,
                "eos_token_id": 1,
            }
        )
    )
    return path


class FakeLink:
    """The router's end of a session with a fake worker."""

    def __init__(self, worker):
        self._worker = worker
        self.inbox = asyncio.Queue()

    def send(self, message):
        if self._worker.link is not self:
            raise LinkBroken("gone")
        self._worker.on_message(message)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.inbox.empty() and not self._worker.is_heard:
            self._worker.is_heard = True  # The router has taken in every message.
            self._worker._notify()
        message = await self.inbox.get()
        if isinstance(message, Exception):
            raise message
        return message


class FakeWorker:
    """A worker that answers every sequence with `reply`, one token per turn of the loop while `gate` is
    open."""

    def __init__(
        self,
        name="w",
        role=Role.AGGREGATED,
        reply=(),
        *,
        endless=False,
        vector=(),
        timings=None,
        pauses_at=-1,
    ):
        self.hello = WorkerHello(WorkerId(f"{name}.1"), role, "f" * 32, MODEL, 16, 100_000, 1_000_000)
        self.reply, self.endless, self.vector = list(reply), endless, vector
        self.timings = timings
        self.pauses_at = pauses_at
        self.refuses = None
        """Reason for which it starts nothing."""
        self.link = None
        self.is_heard = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = {}
        self.started = []
        self.cancelled = []
        self._changed = asyncio.Condition()
        self._tasks = set()

    @contextlib.asynccontextmanager
    async def session(self):
        if self.link is not None:
            raise LinkBroken("one router at a time")
        self.link = FakeLink(self)
        self.tell(LoadReport(self.hello.role, False, 100_000, 0, 0, 0, 0.01))
        try:
            yield self.hello, self.link
        finally:
            self.forget_all()

    def forget_all(self):
        self.link, self.is_heard = None, False
        for task in self.running.values():
            task.cancel()
        self.running.clear()

    def tell(self, message):
        if self.link is not None:
            self.link.inbox.put_nowait(message)

    def crash(self):
        link = self.link
        self.forget_all()
        link.inbox.put_nowait(LinkBroken("it died"))

    def on_message(self, message):
        if isinstance(message, StartSequence):
            self.started.append(message)
            key = SeqKey(message.seq_id, message.epoch)
            if self.refuses is not None:
                self.tell(SequenceRefused(*key, RefusalReason.UNSUPPORTED, self.refuses))
                return
            self.running[key] = asyncio.create_task(self._generate(key, message))
        elif isinstance(message, CancelSequence):
            task = self.running.pop(SeqKey(message.seq_id, message.epoch), None)
            if task is not None:
                self.cancelled.append(message)
                task.cancel()
        self._notify()

    def _notify(self):
        async def notify():
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition):
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(condition)

    def token(self, start, index):
        return self.reply[index % len(self.reply)] if self.endless or index < len(self.reply) else 1

    def logprobs(self, start, index, token):
        """Return made-up logprobs, which the seed tells apart: (index + 1) / 8 below zero, and alternatives
        at whole steps below."""
        if start.sampling.logprobs is None:
            return ()
        own = -(index + 1) / 8 - (start.sampling.seed % 97) / 1000
        others = tuple((50 + i, own - 1 - i) for i in range(start.sampling.logprobs - 1))
        return (TokenLogprobs(token, own, 1, ((token, own), *others) if start.sampling.logprobs else ()),)

    async def _embed(self, key, start):
        await self.gate.wait()
        vector = self.vector or tuple(float(token) for token in start.tokens[-4:])
        self.running.pop(key, None)
        self.tell(StepOutput((SequenceOutput(*key, 0, (), FinishReason.STOP, 2, embedding=vector),)))
        self._notify()

    async def _generate(self, key, start):
        if start.task is Task.EMBED:
            await self._embed(key, start)
            return
        index = start.generated_count
        if start.phase is Phase.DECODE:
            index += 1
            await self.gate.wait()
            self.tell(SequenceJoined(*key, 1024, 0.001, 0.001))
        while True:
            await self.gate.wait()
            await asyncio.sleep(0)
            if index == self.pauses_at:
                await asyncio.Event().wait()  # It waits to be cancelled, which a busy router may do late.
            token = self.token(start, index)
            finish = finish_after(start.sampling, token, index + 1)
            cached = 3 if index == start.generated_count and start.phase is not Phase.DECODE else None
            of_prompt = None
            if cached is not None and start.sampling.prompt_logprobs is not None:
                prompt = start.tokens[1 : start.prompt_token_count]
                of_prompt = tuple(
                    TokenLogprobs(t, -float(i + 1), 2, ((9, -0.5),)) for i, t in enumerate(prompt)
                )
            logprobs = self.logprobs(start, index, token)
            timings = None if cached is None else self.timings
            output = SequenceOutput(
                *key, index, (token,), finish, cached, logprobs, of_prompt, timings=timings
            )
            self.tell(StepOutput((output,)))
            index += 1
            if finish is not None or start.phase is Phase.PREFILL:
                break
        self.running.pop(key, None)
        self._notify()


def called(monkeypatch, thing, name):
    """Return an event that is set right after the method was called."""
    event, method = asyncio.Event(), getattr(thing, name)

    def call(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        finally:
            event.set()

    monkeypatch.setattr(thing, name, call)
    return event


def check_driver(driver):
    """Check that the accounts of core and driver agree."""
    driver._core.check()
    assert bool(driver._sinks) != driver._idle.is_set()


async def soon(event):
    async with asyncio.timeout(BOUND_S):
        await event.wait()


class Cluster:
    def __init__(self, url, router, workers):
        self.url, self.router, self.workers = url, router, workers
        self.driver = router.models.first.driver
        self.clients = []

    @property
    def worker(self):
        return self.workers[0]

    def http(self, **changes):
        return httpx.AsyncClient(base_url=self.url, timeout=BOUND_S, **changes)

    def openai(self, **changes):
        options = {"max_retries": 0, "timeout": BOUND_S, "api_key": "none"} | changes
        self.clients.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options))
        return self.clients[-1]

    async def joined(self):
        for worker in self.workers:
            await worker.until(lambda worker=worker: worker.is_heard)

    async def nothing_in_flight(self):
        """Check that every way out of a request gives everything back, on the router and on the workers."""
        assert await self.driver.idle(BOUND_S)
        for worker in self.workers:
            await worker.until(lambda worker=worker: not worker.running)
        assert all(w.in_flight_count == 0 for w in self.driver.status().workers)
        assert self.driver.status().live == 0
        check_driver(self.driver)


@contextlib.asynccontextmanager
async def cluster(
    folder,
    *workers,
    stop=None,
    drain_timeout_s=BOUND_S,
    context=CONTEXT,
    waits_for_workers=True,
    model=None,
    slo=None,
    telemetry=None,
    **router,
):
    files = str(Path(folder).parent / "files")
    settings = {"port": 0, "worker_silence_s": 60.0, "files_dir": files} | router
    config = Config(
        model={"path": str(folder), "name": MODEL} | (model or {}),
        router={"any_role": False} | settings,
        slo=slo or {},
        telemetry=telemetry or {},
        cluster={"drain_timeout_s": drain_timeout_s},
    )
    tokenizer = await asyncio.to_thread(Tokenizer.load, str(folder))
    tokenizer.card = msgspec.structs.replace(tokenizer.card, context_tokens=context)
    by_address = {f"{w.hello.worker_id}:1": w for w in workers}

    def dial(address, _):
        return by_address[address].session()

    keys = await open_keys(config)
    sockets = Sockets(config.router.model_copy(update={"port": 0}))
    process = RouterProcess(config, {MODEL: tokenizer}, None, list(by_address), dial, sockets, keys=keys)
    stop = stop or asyncio.Event()
    serving = asyncio.create_task(process.run(lambda _: None, stop))
    try:
        running = Cluster(sockets.urls[0], process, workers)
        if waits_for_workers:
            await running.joined()
        try:
            yield running
        finally:
            for client in running.clients:
                await client.close()
        await running.nothing_in_flight()
    finally:
        for worker in workers:
            worker.gate.set()
        stop.set()
        async with asyncio.timeout(BOUND_S):
            await serving
        sockets.close()
        await process.close()
