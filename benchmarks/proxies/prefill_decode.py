"""A front end for one vLLM that prefills and one that decodes, joined by vLLM's NixlConnector.

`python -m benchmarks.proxies.prefill_decode --port 8000 --prefill 127.0.0.1:8001 --decode 127.0.0.1:8002`

A request goes to the prefill server with `max_tokens` 1 and `kv_transfer_params.do_remote_decode`. The
`kv_transfer_params` of its answer go with the request to the decode server, whose answer is passed on byte by
byte. This is the protocol of vLLM's own example
(`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`), with as little parsing as possible, so that
the front end takes as little as possible of the servers' cores.
"""

import argparse
import asyncio
import functools
from dataclasses import dataclass

import httptools
import orjson
import uvloop

from benchmarks.proxies.round_robin import Address, address

READ_BYTES = 65_536
HEAD_BYTES_MAX = 65_536
BODY_BYTES_MAX = 64 * 2**20
HEAD_S = 30.0
PREFILL_S = 300.0
DECODE_SILENCE_S = 300.0

REMOTE_DECODE: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class ProxyError(Exception):
    """An error that is answered with `status` and this text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    method: str
    path: str
    body: bytes


def prefill_body(body: dict[str, object]) -> bytes:
    """The same request, for one token and its KV."""
    asked = {k: v for k, v in body.items() if k not in ("stream_options", "max_completion_tokens")}
    return orjson.dumps(asked | {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})


def decode_body(body: dict[str, object], prefilled: bytes) -> bytes:
    """The request with the place of its KV. Raises ProxyError if the prefill server did not give one."""
    try:
        params = orjson.loads(prefilled)["kv_transfer_params"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        params = None
    if not isinstance(params, dict):
        raise ProxyError(502, "the prefill server's answer has no kv_transfer_params")
    return orjson.dumps(body | {"kv_transfer_params": params})


async def read_request(reader: asyncio.StreamReader) -> ProxyRequest:
    """Raises ProxyError for anything but a request with a body of known length."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.split("\r\n")
            method, path, _ = first.split(" ", 2)
            fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            length = int(fields.get("content-length", "0"))
            if not 0 <= length <= BODY_BYTES_MAX:
                raise ProxyError(413, "the body is too large")
            return ProxyRequest(method, path, await reader.readexactly(length))
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError) as error:
        raise ProxyError(400, f"not a request: {error}") from None


def head_of(request: ProxyRequest, server: Address, body: bytes) -> bytes:
    return (
        f"{request.method} {request.path} HTTP/1.1\r\nHost: {server[0]}:{server[1]}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode("latin-1")


class _Answer:
    """The callbacks of httptools."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


async def ask(server: Address, request: ProxyRequest, body: bytes) -> bytes:
    """The body of the answer. Raises ProxyError without an answer, or for any status but 200."""
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    try:
        async with asyncio.timeout(PREFILL_S):
            reader, writer = await asyncio.open_connection(*server)
            try:
                writer.write(head_of(request, server, body) + body)
                while not answer.is_complete and (data := await reader.read(READ_BYTES)):
                    parser.feed_data(data)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, httptools.HttpParserError) as error:
        raise ProxyError(502, f"the prefill server failed: {error}") from None
    status = parser.get_status_code() if answer.is_complete else 502
    if status != 200:
        raise ProxyError(status, answer.body[:1000].decode("utf-8", "replace"))
    return answer.body


async def pass_on(server: Address, request: ProxyRequest, body: bytes, writer: asyncio.StreamWriter) -> None:
    """Pass on the server's answer, byte by byte. Raises ProxyError before its first byte."""
    try:
        reader, upstream = await asyncio.open_connection(*server)
    except OSError as error:
        raise ProxyError(502, f"the decode server failed: {error}") from None
    try:
        upstream.write(head_of(request, server, body) + body)
        while True:
            async with asyncio.timeout(DECODE_SILENCE_S):
                data = await reader.read(READ_BYTES)
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except (OSError, TimeoutError):
        return  # the client sees a stream that breaks off
    finally:
        upstream.transport.abort()


async def _serve_one(
    prefill: Address, decode: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    request = await read_request(reader)
    if request.method != "POST":
        await pass_on(decode, request, b"", writer)
        return
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise ProxyError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ProxyError(400, "the body is not a JSON object")
    prefilled = await ask(prefill, request, prefill_body(body))
    await pass_on(decode, request, decode_body(body, prefilled), writer)


async def handle(
    prefill: Address, decode: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one connection with one request."""
    try:
        await _serve_one(prefill, decode, reader, writer)
    except ProxyError as error:
        text = orjson.dumps({"error": {"message": str(error), "code": error.status}})
        writer.write(
            f"HTTP/1.1 {error.status} Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(text)}\r\n\r\n".encode()
            + text
        )
    finally:
        writer.close()


async def serve(host: str, port: int, prefill: Address, decode: Address) -> None:
    """Serve until cancelled."""
    server = await asyncio.start_server(
        functools.partial(handle, prefill, decode), host, port, limit=HEAD_BYTES_MAX
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", type=address, required=True, metavar="HOST:PORT")
    parser.add_argument("--decode", type=address, required=True, metavar="HOST:PORT")
    asked = parser.parse_args()
    uvloop.run(serve(asked.host, asked.port, asked.prefill, asked.decode))


if __name__ == "__main__":
    main()
