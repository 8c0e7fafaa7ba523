"""A client that costs little: HTTP streams are read as bytes, and their content is not parsed."""

import asyncio
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

import msgspec

END = b"data: [DONE]"
LATE_S = 60.0


class LoadSeen(msgspec.Struct, frozen=True):
    completed: int
    failed: int
    took_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    """Seconds from the intended send time to the first byte of the first event."""
    total_p50_s: float


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.first_s = 0.0
        self.tail = b""
        self.done: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not declare asyncio's type
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        self.tail = (self.tail + data)[-64:]
        # The chunk of length 0 ends the body; only then may the connection be reused.
        if self.tail.endswith(b"0\r\n\r\n") and self.done is not None and not self.done.done():
            self.done.set_result(END in self.tail)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.done is not None and not self.done.done():
            self.done.set_result(False)


class StreamClient:
    """Keeps as many connections as were ever needed at once."""

    def __init__(self, url: str, model: str, *, max_tokens: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._model, self._max_tokens = model, max_tokens
        self._idle: list[_Connection] = []

    def request(self, prompt: str) -> bytes:
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, request: bytes, since_s: float) -> tuple[float, float] | None:
        """(seconds to the first event, to the end) since `since_s`; None if it failed."""
        loop = asyncio.get_running_loop()
        connection = self._idle.pop() if self._idle else None
        try:
            async with asyncio.timeout(LATE_S):
                if connection is None or connection.transport is None:
                    _, connection = await loop.create_connection(_Connection, self._host, self._port)
                assert connection.transport is not None
                connection.first_s, connection.tail, connection.done = 0.0, b"", loop.create_future()
                connection.transport.write(request)
                is_whole = await connection.done
        except (OSError, TimeoutError):
            return None
        if not is_whole:
            return None
        self._idle.append(connection)
        return connection.first_s - since_s, time.perf_counter() - since_s

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()


async def open_loop(client: StreamClient, prompts: Sequence[str], *, rate: float, seconds: float) -> LoadSeen:
    """Send requests at fixed intervals, whether or not earlier ones have ended."""
    requests = [client.request(prompt) for prompt in prompts]
    start_s = time.perf_counter()
    tasks: list[asyncio.Task[tuple[float, float] | None]] = []
    for number in range(max(1, int(rate * seconds))):
        due_s = start_s + number / rate
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(client.ask(requests[number % len(requests)], due_s)))
    return _seen(await asyncio.gather(*tasks), time.perf_counter() - start_s)


async def closed_loop(
    client: StreamClient, prompts: Sequence[str], *, clients: int, requests: int
) -> LoadSeen:
    """Keep this many requests in flight; each client asks again when it was answered."""
    encoded = [client.request(prompt) for prompt in prompts]
    numbers = iter(range(requests))
    start_s = time.perf_counter()

    async def one() -> list[tuple[float, float] | None]:
        return [await client.ask(encoded[n % len(encoded)], time.perf_counter()) for n in numbers]

    answers = await asyncio.gather(*(one() for _ in range(clients)))
    return _seen([answer for some in answers for answer in some], time.perf_counter() - start_s)


def _seen(answers: Sequence[tuple[float, float] | None], took_s: float) -> LoadSeen:
    good = [answer for answer in answers if answer is not None]
    firsts, totals = sorted(a[0] for a in good), sorted(a[1] for a in good)
    return LoadSeen(
        len(good), len(answers) - len(good), took_s, at(firsts, 0.5), at(firsts, 0.99), at(totals, 0.5)
    )


def at(ordered: Sequence[float], share: float) -> float:
    """The quantile of ordered values; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
