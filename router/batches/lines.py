"""The lines of a batch's input, and of its results. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from router.batches.records import BatchFault

FAULTS_MAX = 100
"""Most faults of one batch that are told."""
CUSTOM_ID_MAX = 512
PRIORITY_BEHIND = 1_000_000
"""Priority of requests of batches that name none. It is behind that of everything that somebody waits for."""


class BatchLine(msgspec.Struct, frozen=True):
    custom_id: str
    body: dict[str, Any]

    def body_bytes(self) -> bytes:
        """Return the body as it is sent: behind other requests, and in one piece."""
        return orjson.dumps({"priority": PRIORITY_BEHIND} | self.body)


def read_line(line: bytes, endpoint: str) -> BatchLine:
    """Return one request. Raises ValueError with the field and what is wrong with it."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError("", f"the line is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("", "the line must be a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_MAX:
        raise ValueError("custom_id", f"custom_id must be a string of 1 to {CUSTOM_ID_MAX} characters")
    if fields.get("method", "POST") != "POST":
        raise ValueError("method", "method must be POST")
    if fields.get("url") != endpoint:
        raise ValueError("url", f"url must be the batch's endpoint, {endpoint}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ValueError("body", "body must be an object")
    if body.get("stream"):
        raise ValueError("body.stream", "the requests of a batch are not streamed: leave stream out")
    return BatchLine(custom_id, body)


def check_lines(lines: Iterable[bytes], endpoint: str, *, requests_max: int) -> tuple[int, list[BatchFault]]:
    """Return the number of requests and what is wrong with them."""
    count, faults, seen = 0, list[BatchFault](), set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        count += 1
        if count > requests_max:
            message = f"a batch has at most {requests_max} requests"
            return count, [BatchFault("too_many_requests", message, number)]
        try:
            found = read_line(line, endpoint)
            if found.custom_id in seen:
                raise ValueError("custom_id", f"custom_id {found.custom_id!r:.80} is there twice")
            seen.add(found.custom_id)
        except ValueError as error:
            param, message = error.args
            faults.append(BatchFault("invalid_line", message, number, param or None))
            if len(faults) >= FAULTS_MAX:
                break
    if not count:
        faults.append(BatchFault("empty_file", "the input file has no requests"))
    return count, faults


def done_ids(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the custom ids of results. A last line that was cut off by a crash is left out."""
    for line in lines:
        if line.endswith(b"\n"):
            yield orjson.loads(line)["custom_id"]


def result_line(custom_id: str, request_id: str, status: int, body: Any) -> bytes:
    """Return the line of a request that was answered."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, request_id, response, None)


def unanswered_line(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that was not run."""
    return _line(custom_id, request_id, None, {"code": code, "message": message})


def _line(custom_id: str, request_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(line) + b"\n"
