"""/v1/files and /v1/batches: OpenAI's files, and batches of requests that run when there is room."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from baton.core.errors import BatonError, BodyTooLarge, ClientError
from router.batches.bodies import BatchBody
from router.batches.folder import ObjectNotFound
from router.batches.records import ENDPOINTS, BatchRecord, FileRecord
from router.http.batch_runner import BatchRunner
from router.http.client import client_of
from router.http.pages import READ, json_response
from router.http.request_ids import new_id
from router.openai.bodies import parse_body
from router.responses.body import check_metadata

FORM_BYTES = 64 * 1024
"""Bytes of an upload beside the file itself."""
SMALL_BODY_BYTES_MAX = 64 * 1024
PAGE_MAX = 10_000
WINDOW_S = {"24h": 86_400}

R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T")


def add_files(app: FastAPI, runner: BatchRunner) -> None:
    folder = runner.folder

    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        async with _uploaded(request, folder.bounds.file_bytes_max) as (file, purpose):
            if purpose != "batch":
                raise ClientError(f"purpose must be batch, not {purpose!r:.60}", param="purpose")
            now = int(time.time())
            record = FileRecord(
                f"file-{new_id()}",
                (file.filename or "file.jsonl")[:255],
                purpose,
                file.size or 0,
                now,
                now + int(folder.bounds.keep_s),
            )
            tenant = client_of(request.scope).name
            kept = await _kept(lambda: folder.add_file(tenant, record, file.file))
        return json_response(kept.as_dict())

    @app.api_route("/v1/files", methods=READ)
    async def listed(request: Request) -> Response:
        tenant = client_of(request.scope).name
        found = await _kept(lambda: folder.files(tenant))
        purpose = request.query_params.get("purpose")
        found = [one for one in found if purpose in (None, one.purpose)]
        if _choice(request, "order", ("desc", "asc")) == "asc":
            found.reverse()
        return json_response(_page(found, request, lambda one: one.file_id, default=PAGE_MAX))

    @app.api_route("/v1/files/{file_id}", methods=READ)
    async def file(request: Request, file_id: str) -> Response:
        tenant = client_of(request.scope).name
        return json_response((await _kept(lambda: folder.file(tenant, file_id))).as_dict())

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        tenant = client_of(request.scope).name
        await _kept(lambda: folder.delete_file(tenant, file_id))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @app.api_route("/v1/files/{file_id}/content", methods=READ)
    async def content(request: Request, file_id: str) -> Response:
        tenant = client_of(request.scope).name
        path = await _kept(lambda: folder.data_path(tenant, file_id))
        return FileResponse(path, media_type="application/octet-stream")


def add_batches(app: FastAPI, runner: BatchRunner) -> None:
    folder = runner.folder

    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        body = parse_body(await _small_body(request), BatchBody, {"output_expires_after": ()})
        _check_batch(body)
        now = int(time.time())
        record = BatchRecord(
            f"batch_{new_id()}",
            client_of(request.scope).name,
            body.endpoint,
            body.input_file_id,
            body.completion_window,
            now,
            now + WINDOW_S[body.completion_window],
            body.metadata or {},
        )
        try:
            await _kept(lambda: folder.add_batch(record))
        except ObjectNotFound as error:
            raise ClientError(str(error), param="input_file_id") from error
        runner.on_new_batch()
        return json_response(record.as_dict())

    @app.api_route("/v1/batches", methods=READ)
    async def listed(request: Request) -> Response:
        tenant = client_of(request.scope).name
        found = await _kept(lambda: folder.batches(tenant))
        return json_response(_page(found, request, lambda one: one.batch_id, default=20))

    @app.api_route("/v1/batches/{batch_id}", methods=READ)
    async def batch(request: Request, batch_id: str) -> Response:
        tenant = client_of(request.scope).name
        return json_response((await _kept(lambda: folder.batch(tenant, batch_id))).as_dict())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        tenant = client_of(request.scope).name
        found = await _kept(lambda: folder.cancel(tenant, batch_id))
        runner.on_new_batch()
        return json_response(found.as_dict())


async def _kept(work: Callable[[], T]) -> T:
    """Do work on the folder in a thread. Raises BatonError."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise BatonError(
            f"files cannot be kept: {error.strerror or error}; router.files_dir must be writable"
        ) from error


def _check_batch(body: BatchBody) -> None:
    if body.endpoint not in ENDPOINTS:
        raise ClientError(
            f"endpoint must be one of {', '.join(sorted(ENDPOINTS))}, not {body.endpoint!r:.80}",
            param="endpoint",
        )
    if body.completion_window not in WINDOW_S:
        raise ClientError("completion_window must be 24h", param="completion_window")
    check_metadata(body.metadata)


async def _small_body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > SMALL_BODY_BYTES_MAX:
            raise BodyTooLarge(f"the body may have at most {SMALL_BODY_BYTES_MAX} bytes")
    return b"".join(parts)


@contextlib.asynccontextmanager
async def _uploaded(request: Request, bytes_max: int) -> AsyncGenerator[tuple[UploadFile, str]]:
    """Read the form of an upload. Files above a MiB are on disk meanwhile. Raises ClientError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ClientError(
            "send the file as multipart/form-data, with the fields file and purpose", param="file"
        )

    async def bounded() -> AsyncGenerator[bytes]:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > bytes_max + FORM_BYTES:
                raise BodyTooLarge(f"a file may have at most {bytes_max} bytes (router.file_bytes_max)")
            yield part

    parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=8, max_part_size=FORM_BYTES)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise ClientError(f"the form is not valid: {error}", param="file") from error
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ClientError("file is required: the file of a form", param="file")
        if not isinstance(purpose, str):
            raise ClientError("purpose is required", param="purpose", code="missing_required_parameter")
        yield file, purpose
    finally:
        await form.close()


def _choice(request: Request, name: str, choices: Sequence[str]) -> str:
    value = request.query_params.get(name, choices[0])
    if value not in choices:
        raise ClientError(f"{name} must be {' or '.join(choices)}, not {value!r:.40}", param=name)
    return value


def _page(found: list[R], request: Request, id_of: Callable[[R], str], *, default: int) -> dict[str, Any]:
    """Return a page of a list, as `limit` and `after` ask for it. Raises ClientError."""
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX):
        raise ClientError(f"limit must be from 1 to {PAGE_MAX}, not {limit!r:.40}", param="limit")
    if (after := request.query_params.get("after")) is not None:
        ids = [id_of(one) for one in found]
        if after not in ids:
            raise ClientError(f"after names {after!r:.80}, which is not in the list", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[: int(limit)]
    return {
        "object": "list",
        "data": [one.as_dict() for one in page],
        "first_id": id_of(page[0]) if page else None,
        "last_id": id_of(page[-1]) if page else None,
        "has_more": len(found) > len(page),
    }
