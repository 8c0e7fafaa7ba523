"""Runs batches: their requests go the way of every other request of their tenant, behind all that somebody
waits for, and no faster than there is room. Tenants share the room, so that a long batch holds up none of
others."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import orjson

from baton.config.router import RouterConfig
from baton.files.cache import cache_folder
from router.batches.folder import ObjectNotFound, StateFolder
from router.batches.lines import BatchLine, check_lines, done_ids, read_line, result_line, unanswered_line
from router.batches.records import BatchBounds, BatchFault, BatchRecord, FileRecord
from router.batches.slots import FairSlots
from router.http.asgi import REQUEST_ID, App, Message
from router.http.authentication import AccessControl
from router.http.client import CLIENT, AuthenticatedClient
from router.http.error_middleware import ErrorMiddleware
from router.http.request_ids import new_id
from router.live.drivers import Drivers
from router.tenants.service_classes import HEADER

log = logging.getLogger(__name__)

LOOK_S = 30.0
"""Time after which a router looks for batches that another one left behind."""
ROOM_S = 0.2
"""Time after which a router looks for room again."""
PURGE_S = 3600.0
RETRY_S_MAX = 60.0
TENANTS_MAX = 256
"""Tenants whose batches one router runs at once. Further ones wait until one has none left."""
TRIES_MAX = 3
"""Times that a request is tried which ended with a defect."""
KEPT_EVERY_S = 1.0
"""Time between two writes of a batch's counts."""
TRY_AGAIN = frozenset({408, 429, 503, 504})


def files_folder(config: RouterConfig) -> Path:
    """Return the folder of files and batches. Nothing is made until something is kept."""
    if config.files_dir:
        return Path(config.files_dir).expanduser()
    return cache_folder("files") / (str(config.port) if config.port else f"process-{os.getpid()}")


def bounds_of(config: RouterConfig) -> BatchBounds:
    return BatchBounds(
        file_bytes_max=config.file_bytes_max,
        tenant_bytes_max=config.files_bytes_max,
        files_max=config.files_max,
        requests_max=config.batch_requests_max,
        batches_max=config.batches_max,
        keep_s=config.files_keep_s,
    )


class Answered(NamedTuple):
    status: int
    body: Any
    retry_after_s: float
    request_id: str


class BatchRunner:
    """Runs the batches of a folder, those of one tenant one after the other, as long as `run` runs."""

    def __init__(self, config: RouterConfig, drivers: Drivers, access: AccessControl) -> None:
        self.folder = StateFolder(files_folder(config), bounds_of(config))
        self.handlers: Mapping[str, App] = {}
        """Applications by path, which answer the requests."""
        self._config, self._drivers, self._access = config, drivers, access
        self.slots = FairSlots(config.batch_in_flight_max)
        self._running = set[str]()
        """Tenants whose batches run here."""
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        """Set when the router stops: all requests of batches are then cancelled, and run later."""

    def on_new_batch(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Look for batches and run them, until `stop`."""
        if not self._config.batch_in_flight_max:
            return
        purge_due_s = 0.0
        async with asyncio.TaskGroup() as group:
            while not self._gone.is_set():
                self._news.clear()
                try:
                    if time.monotonic() >= purge_due_s:
                        purge_due_s = time.monotonic() + PURGE_S
                        await asyncio.to_thread(self._purge)
                    self._start(await asyncio.to_thread(self.folder.unfinished), group)
                except OSError as error:
                    log.warning("batches in %s cannot be read: %s", self.folder.root, error)
                await self._wait(self._news, LOOK_S)

    def _start(self, unfinished: list[BatchRecord], group: asyncio.TaskGroup) -> None:
        """Run the batches of tenants that have none running, oldest first."""
        waiting: dict[str, list[BatchRecord]] = {}
        for record in unfinished:
            if record.tenant not in self._running:
                waiting.setdefault(record.tenant, []).append(record)
        for tenant, records in waiting.items():
            if len(self._running) >= TENANTS_MAX:
                return
            self._running.add(tenant)
            group.create_task(self._run_tenant(tenant, records))

    async def _run_tenant(self, tenant: str, records: list[BatchRecord]) -> None:
        try:
            claims = [await self._run_claimed(record) for record in records]
        except OSError as error:
            log.warning("batches of tenant %s in %s cannot be run: %s", tenant, self.folder.root, error)
        else:
            if any(claims):  # Others may have come meanwhile, also of tenants for whom there was no room.
                self._news.set()
        finally:
            self._running.discard(tenant)

    def stop(self) -> None:
        self._gone.set()
        self._news.set()

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def _purge(self) -> None:
        for folder in self.folder.root.glob("tenant-*"):
            self.folder.purge(folder.name.removeprefix("tenant-"))

    async def _run_claimed(self, record: BatchRecord) -> bool:
        """Run the batch unless another router does. Returns whether it ran here; one that failed is left for
        the next look. Raises OSError."""
        claim = None if self._gone.is_set() else await asyncio.to_thread(self.folder.claim, record)
        if claim is None:
            return False
        try:
            with contextlib.suppress(ObjectNotFound):  # It was deleted meanwhile.
                await self._run(await asyncio.to_thread(self.folder.batch, record.tenant, record.batch_id))
        except OSError:
            raise
        except Exception as error:
            if isinstance(error, ExceptionGroup) and (failed := error.subgroup(OSError)) is not None:
                raise OSError(f"batch {record.batch_id}: {failed.exceptions[0]}") from error
            log.exception("batch %s is left for later", record.batch_id)
            return False
        finally:
            claim.close()
        return True

    async def _run(self, record: BatchRecord) -> None:
        if record.is_over:
            return
        folder = self.folder
        client = self._access.client_named(record.tenant)
        if client is None:
            fault = BatchFault("tenant_not_found", f"there is no tenant {record.tenant} any more")
            await self._keep(record.moved("failed", _now(), faults=(fault,)))
            return
        path = await asyncio.to_thread(folder.data_path, record.tenant, record.input_file_id)
        if record.status == "validating":
            most = folder.bounds.requests_max
            total, faults = await asyncio.to_thread(
                lambda: check_lines(folder.lines(path), record.endpoint, requests_max=most)
            )
            if faults:
                await self._keep(record.moved("failed", _now(), total=total, faults=tuple(faults)))
                return
            record = await self._keep(record.moved("in_progress", _now(), total=total))
        run = _BatchRun(self, record, client)
        with await asyncio.to_thread(path.open, "rb") as file:
            await run.all(file)
        if not self._gone.is_set():
            await self._finish(run.record, is_cancelled=run.is_cancelled)

    async def _keep(self, record: BatchRecord) -> BatchRecord:
        await asyncio.to_thread(self.folder.write_batch, record)
        return record

    async def _finish(self, record: BatchRecord, *, is_cancelled: bool) -> None:
        record = await self._keep(record.moved("finalizing", _now()))
        output = await asyncio.to_thread(self._as_file, record, "output")
        error = await asyncio.to_thread(self._as_file, record, "error")
        is_late = _now() >= record.expires_at
        status = "cancelled" if is_cancelled else "expired" if is_late else "completed"
        await self._keep(record.moved(status, _now(), output_file_id=output, error_file_id=error))
        log.info(
            "batch %s of tenant %s is %s: %d of %d requests answered, %d failed",
            record.batch_id, record.tenant, status, record.completed, record.total, record.failed,
        )  # fmt: skip

    def _as_file(self, record: BatchRecord, kind: str) -> str | None:
        now, keep_s = _now(), int(self.folder.bounds.keep_s)
        name = f"{record.batch_id}_{kind}.jsonl"
        # The id follows from the batch, so that a crash in between makes no second file.
        digits = record.batch_id.removeprefix("batch_")
        file_id = f"file-{digits[:-1]}{'0' if kind == 'output' else '1'}"
        file = FileRecord(file_id, name, "batch_output", 0, now, now + keep_s)
        found = self.folder.as_file(record, kind, file)
        if found is None:
            with contextlib.suppress(ObjectNotFound):
                return self.folder.file(record.tenant, file_id).file_id
        return None if found is None else found.file_id

    # --- requests ---------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._gone.is_set()

    @property
    def in_flight_max(self) -> int:
        return self._config.batch_in_flight_max

    async def until_room(self) -> None:
        """Wait until nothing waits for a place."""
        while not self._gone.is_set() and any(driver.status().queued for driver in self._drivers.all):
            await self._wait(self._gone, ROOM_S)

    async def wait_before_retry(self, seconds: float) -> None:
        await self._wait(self._gone, min(max(seconds, ROOM_S), RETRY_S_MAX))

    async def answer(self, endpoint: str, body: bytes, client: AuthenticatedClient) -> Answered:
        """Have one request answered by the application of its path."""
        request_id = new_id()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        if self._config.batch_slo_class:
            headers.append((HEADER.encode(), self._config.batch_slo_class.encode()))
        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": endpoint, "query_string": b"", "headers": headers,
            CLIENT: client, REQUEST_ID: request_id,
        }  # fmt: skip
        is_read = False
        status, answered, retry_after_s = 500, list[bytes](), 0.0

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, retry_after_s
            if message["type"] == "http.response.start":
                status = message["status"]
                found = dict(message["headers"]).get(b"retry-after")
                retry_after_s = float(found) if found else 0.0
            else:
                answered.append(message.get("body", b""))

        await ErrorMiddleware(self.handlers[endpoint])(scope, receive, send)
        text = b"".join(answered)
        return Answered(status, orjson.loads(text) if text else None, retry_after_s, request_id)


class _BatchRun:
    """One run of a batch, from the first request without a result to the last."""

    def __init__(self, runner: BatchRunner, record: BatchRecord, client: AuthenticatedClient) -> None:
        self.record = record
        self.is_cancelled = False
        self._runner, self._client = runner, client
        self._folder = runner.folder
        self._writing = asyncio.Lock()
        self._kept_s = time.monotonic()

    async def all(self, file: BinaryIO) -> None:
        done, failed = await asyncio.to_thread(self._done)
        self.record = _counted(self.record, completed=len(done), failed=len(failed))
        done |= failed
        slots = asyncio.Semaphore(self._runner.in_flight_max)
        async with asyncio.TaskGroup() as group:
            while line := await asyncio.to_thread(file.readline):
                if not line.strip():
                    continue
                request = read_line(line, self.record.endpoint)
                if request.custom_id in done:
                    continue
                await slots.acquire()
                await self._look_for_end()
                if self._runner.is_stopping or self.is_cancelled:
                    break
                if _now() >= self.record.expires_at:
                    slots.release()
                    await self._expired(request)
                    continue
                task = group.create_task(self._one(request))
                task.add_done_callback(lambda _: slots.release())

    def _done(self) -> tuple[set[str], set[str]]:
        """Return the custom ids that have results, and those that have errors."""
        ids = [
            set(done_ids(self._folder.lines(self._folder.results_path(self.record, kind))))
            for kind in ("output", "error")
        ]
        return ids[0], ids[1]

    async def _look_for_end(self) -> None:
        self.is_cancelled |= await asyncio.to_thread(self._folder.is_cancelled, self.record)

    async def _one(self, request: BatchLine) -> None:
        tries = 0
        body = request.body_bytes()
        while True:
            async with self._runner.slots.one(self.record.tenant):
                await self._runner.until_room()
                if self._runner.is_stopping or self.is_cancelled:
                    return
                if _now() >= self.record.expires_at:
                    await self._expired(request)
                    return
                answered = await self._runner.answer(self.record.endpoint, body, self._client)
            if self._runner.is_stopping and answered.status != 200:
                return  # It runs again when a router runs this batch next.
            tries += answered.status not in TRY_AGAIN
            is_final = answered.status == 429 and not answered.retry_after_s
            may_work = answered.status in TRY_AGAIN or (answered.status >= 500 and tries < TRIES_MAX)
            if not may_work or is_final or _now() >= self.record.expires_at:
                break
            await self._look_for_end()
            if self.is_cancelled:
                return
            await self._runner.wait_before_retry(answered.retry_after_s)
        line = result_line(request.custom_id, answered.request_id, answered.status, answered.body)
        await self._add("output" if answered.status == 200 else "error", line)

    async def _expired(self, request: BatchLine) -> None:
        message = "This request could not be executed before the completion window expired."
        await self._add("error", unanswered_line(request.custom_id, new_id(), "batch_expired", message))

    async def _add(self, kind: str, line: bytes) -> None:
        async with self._writing:
            await asyncio.to_thread(self._folder.append, self.record, kind, line)
            is_good = kind == "output"
            self.record = _counted(
                self.record,
                completed=self.record.completed + is_good,
                failed=self.record.failed + (not is_good),
            )
            if time.monotonic() - self._kept_s >= KEPT_EVERY_S:
                self._kept_s = time.monotonic()
                await asyncio.to_thread(self._folder.write_batch, self.record)


def _counted(record: BatchRecord, *, completed: int, failed: int) -> BatchRecord:
    return msgspec.structs.replace(record, completed=completed, failed=failed)


def _now() -> int:
    return int(time.time())
