"""What a worker counts, and the small HTTP server that shows it."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from baton.core.ids import WorkerId, replica_name
from baton.core.messages import StepOutput
from baton.core.steps import StepPlan, StepResult
from baton.telemetry import catalogue
from baton.telemetry.catalogue import Metric
from baton.telemetry.metrics import CONTENT_TYPE, Meter
from baton.worker.events import ToRouter, WorkerAction, WorkerEvent
from kv_transfer.manager import ReadOutcome, TransferCounters

log = logging.getLogger(__name__)

REQUEST_S = 5.0
"""From connecting to the end of the answer."""
REQUEST_BYTES_MAX = 16_384

GAUGES: dict[str, Metric] = {
    "free_blocks": catalogue.FREE_BLOCKS,
    "held_blocks": catalogue.HELD_BLOCKS,
    "quarantined_blocks": catalogue.QUARANTINED_BLOCKS,
    "lease_count": catalogue.LEASED,
    "running_count": catalogue.RUNNING,
    "waiting_count": catalogue.WAITING,
}
"""Account of the core's status -> metric."""


class WorkerMetrics:
    """Labelled with the replica's stable name, so that a restart continues its series."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.meter = Meter()
        self._worker = replica_name(worker_id)
        self._bytes_seen: dict[str, int] = {}

    def totals(self) -> dict[str, float]:
        """For the worker's accounts: what it has computed, by kind of work."""
        value = self.meter.value
        totals = {
            f"step_tokens.{kind}": value(catalogue.STEP_TOKENS, worker=self._worker, kind=kind)
            for kind in ("prefill", "decode")
        }
        return {**totals, "prefix_hit_tokens": value(catalogue.PREFIX_HIT_TOKENS, worker=self._worker)}

    def saw(self, event: WorkerEvent) -> None:
        """Nothing is counted by what comes in."""

    def did(self, action: WorkerAction) -> None:
        match action:
            case ToRouter(_, StepOutput(outputs)):
                cached = sum(output.cached_token_count or 0 for output in outputs)
                if cached:
                    self.meter.inc(catalogue.PREFIX_HIT_TOKENS, cached, worker=self._worker)
            case _:
                pass

    def step(self, plan: StepPlan, result: StepResult) -> None:
        self.meter.observe(catalogue.STEP, result.elapsed_s, worker=self._worker)
        decode_count = sum(len(item.tokens) == 1 and item.sample_index is not None for item in plan.items)
        prefill_count = plan.token_count - decode_count
        self.meter.inc(catalogue.STEP_TOKENS, prefill_count, worker=self._worker, kind="prefill")
        self.meter.inc(catalogue.STEP_TOKENS, decode_count, worker=self._worker, kind="decode")

    def read(self, outcome: ReadOutcome) -> None:
        how = "stale" if outcome.is_stale else "failed" if outcome.error else "ok"
        self.meter.inc(catalogue.TRANSFER_READS, worker=self._worker, outcome=how)
        self.meter.observe(catalogue.TRANSFER, outcome.seconds, worker=self._worker)

    def accounts(self, accounts: Mapping[str, float], transfer: Mapping[str, TransferCounters]) -> None:
        """Gauges as they are now; bytes by backend as they have become."""
        for name, metric in GAUGES.items():
            self.meter.set(metric, accounts.get(name, 0.0), worker=self._worker)
        for backend, counters in transfer.items():
            new_bytes = counters.bytes_read - self._bytes_seen.get(backend, 0)
            self._bytes_seen[backend] = counters.bytes_read
            self.meter.inc(catalogue.TRANSFER_BYTES, new_bytes, worker=self._worker, backend=backend)


class MetricsServer:
    """GET /metrics and /health, one answer per connection. Not for the public."""

    def __init__(self, *, render: Callable[[], bytes], health: Callable[[], dict[str, object]]) -> None:
        self._render, self._health = render, health
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=REQUEST_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked has gone or talks nonsense
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        path = head.split(b" ", 2)[1:2]
        match path[0].split(b"?")[0] if path else b"":
            case b"/metrics":
                return _response("200 OK", CONTENT_TYPE, self._render())
            case b"/health" | b"/health/live" | b"/health/ready":
                return _response("200 OK", "application/json", msgspec.json.encode(self._health()))
            case _:
                return _response("404 Not Found", "text/plain", b"try /metrics or /health\n")


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
