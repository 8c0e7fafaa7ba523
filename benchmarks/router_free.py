"""Workers that cost nothing, so that everything measured in front of them is the router's.

They give the same answers by two protocols. Baton's is a session with one message per step that has a token
of every sequence. OpenAI's is one HTTP stream per request with a chunk per token, as other routers need it.
The first token comes at once, the others with the worker's steps.

`python -m benchmarks.router_free` serves until it is killed and prints its ports as JSON.
"""

import asyncio
import sys
from typing import cast

import msgspec
import uvloop

from baton.config import Config
from baton.core import garbage
from baton.core.costs import StepCosts
from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    CancelSequence,
    LoadReport,
    Phase,
    Role,
    RouterMessage,
    SequenceJoined,
    SequenceOutput,
    StartSequence,
    StepOutput,
    WorkerHello,
)
from baton.core.sampling import FinishReason
from baton.wire.server import WorkerEnd, start_server
from baton.wire.services import WorkerStatusReply
from baton.wire.transport import secure

FINGERPRINT = "0" * 32
REPORT_S = 0.25
BLOCKS = 4_000_000
CONTEXT_TOKENS = 1_000_000


class FreeWorkerPlan(msgspec.Struct, frozen=True):
    """The command line of the process, as JSON."""

    model: str
    roles: list[Role]
    """Roles of the workers with Baton's protocol; empty for HTTP."""
    http_count: int = 0
    step_s: float = 0.01
    block_tokens: int = 16
    tokens: tuple[int, ...] = (100,)
    """Token ids that are generated repeatedly."""
    text: str = "w100 "
    """The same tokens as text, for HTTP."""


class Ports(msgspec.Struct, frozen=True):
    workers: list[int]
    http: list[int]


class _Sequence:
    __slots__ = ("epoch", "max_tokens", "next_index", "seq_id")

    def __init__(self, start: StartSequence, next_index: int) -> None:
        self.seq_id, self.epoch = start.seq_id, start.epoch
        self.max_tokens, self.next_index = start.sampling.max_tokens, next_index


class FreeWorker:
    """Implements `baton.wire.server.WorkerHandler`."""

    def __init__(self, plan: FreeWorkerPlan, role: Role, number: int) -> None:
        self._plan, self._role = plan, role
        self._hello = WorkerHello(
            WorkerId(f"free-{number}"),
            role,
            FINGERPRINT,
            plan.model,
            plan.block_tokens,
            BLOCKS,
            CONTEXT_TOKENS,
            costs=StepCosts(plan.step_s, 0.0, 0.0, 0.0),
            batch_sequences_max=4096,
        )

    async def serve_router(self, router_id: RouterId, link: WorkerEnd) -> None:
        running: dict[SequenceId, _Sequence] = {}
        link.send(self._hello)
        link.send(BlockEvents(0, is_snapshot=True))
        link.send(self._report())
        steps = asyncio.create_task(self._steps(link, running))
        try:
            async for message in link:
                self._on_message(link, running, message)
        finally:
            steps.cancel()

    def _on_message(
        self, link: WorkerEnd, running: dict[SequenceId, _Sequence], message: RouterMessage
    ) -> None:
        match message:
            case StartSequence(phase=Phase.DECODE):
                link.send(SequenceJoined(message.seq_id, message.epoch, 0, 0.0, 0.0))
                running[message.seq_id] = _Sequence(message, 1)
            case StartSequence():
                sequence = _Sequence(message, 0)
                link.send(StepOutput((self._output(sequence),)))
                if message.phase is Phase.AGGREGATED and sequence.next_index < sequence.max_tokens:
                    running[message.seq_id] = sequence
            case CancelSequence():
                running.pop(message.seq_id, None)
            case _:
                pass

    def _output(self, sequence: _Sequence) -> SequenceOutput:
        index, tokens = sequence.next_index, self._plan.tokens
        sequence.next_index += 1
        is_last = sequence.next_index >= sequence.max_tokens
        return SequenceOutput(
            sequence.seq_id,
            sequence.epoch,
            index,
            (tokens[index % len(tokens)],),
            finish=FinishReason.LENGTH if is_last else None,
            cached_token_count=0 if index == 0 else None,
        )

    async def _steps(self, link: WorkerEnd, running: dict[SequenceId, _Sequence]) -> None:
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while True:
            await asyncio.sleep(self._plan.step_s)
            if running:
                link.send(StepOutput(tuple(self._output(sequence) for sequence in running.values())))
                for seq_id in [s for s, q in running.items() if q.next_index >= q.max_tokens]:
                    del running[seq_id]
            if loop.time() - reported_s > REPORT_S:
                reported_s = loop.time()
                link.send(self._report())

    def _report(self) -> LoadReport:
        return LoadReport(self._role, False, BLOCKS, 0, 0, 0, self._plan.step_s)

    async def drain(self) -> None: ...

    async def set_role(self, role: Role, drain_s: float) -> None: ...

    def status(self) -> WorkerStatusReply:
        return WorkerStatusReply(self._hello.worker_id, self._role, False, FINGERPRINT, {})


class _StepTimer:
    """One step timer for all streams of an HTTP worker."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.streams: dict[FreeHttp, int] = {}
        """Tokens that are left, by connection."""

    async def run(self, chunk: bytes, end: bytes) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for stream, left in list(self.streams.items()):
                if left > 1:
                    stream.write(chunk)
                    self.streams[stream] = left - 1
                else:
                    stream.write(chunk + end)
                    del self.streams[stream]


class FreeHttp(asyncio.Protocol):
    """One connection of an OpenAI server that generates at no cost."""

    def __init__(self, plan: FreeWorkerPlan, steps: _StepTimer, chunk: bytes) -> None:
        self._plan, self._steps, self._chunk = plan, steps, chunk
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not declare asyncio's type
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.streams.pop(self, None)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head_end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:head_end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < head_end + 4 + length:
                return
            body = self._buffer[head_end + 4 : head_end + 4 + length]
            self._buffer = self._buffer[head_end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post /v1/"):
            models = {"object": "list", "data": [{"id": self._plan.model}], "model_path": self._plan.model}
            said = msgspec.json.encode(models)
            kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self.write(kind % len(said) + said)
            return
        max_tokens = msgspec.json.decode(body)["max_tokens"]
        kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.write(kind + self._chunk)
        self._steps.streams[self] = max_tokens - 1


def _chunked(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


async def _serve(plan: FreeWorkerPlan) -> None:
    loop = asyncio.get_running_loop()
    workers: list[int] = []
    servers: list[object] = []
    """References to the servers, because an unreferenced server is stopped."""
    for number, role in enumerate(plan.roles):
        server, port = await start_server("127.0.0.1", 0, worker=FreeWorker(plan, role, number))
        servers.append(server)
        workers.append(port)
    body = {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1,
        "model": plan.model,
        "choices": [{"index": 0, "text": plan.text, "logprobs": None, "finish_reason": None}],
    }
    chunk = _chunked(b"data: " + msgspec.json.encode(body) + b"\n\n")
    end = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    http: list[int] = []
    beats: list[asyncio.Task[None]] = []
    for _ in range(plan.http_count):
        steps = _StepTimer(plan.step_s)
        beats.append(asyncio.create_task(steps.run(chunk, end)))
        listening = await loop.create_server(lambda s=steps: FreeHttp(plan, s, chunk), "127.0.0.1", 0)
        servers.append(listening)
        http.append(listening.sockets[0].getsockname()[1])
    garbage.spare_what_stays()
    print(msgspec.json.encode(Ports(workers, http)).decode(), flush=True)
    await asyncio.gather(asyncio.Event().wait(), *beats)


if __name__ == "__main__":
    config = Config()  # reads the environment, like the router under test
    secure(config.tls, config.access)
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=FreeWorkerPlan)))
