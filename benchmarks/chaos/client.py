"""The clients of a drill. Like a client behind a balancer, each asks another router when one refuses, ends
with an error, or breaks off, until it has its answer."""

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec
import orjson

from benchmarks.chaos.answers import HeardAnswer
from benchmarks.chaos.outcomes import AskedRequest, ClientAttempt, End, Stretch
from benchmarks.chaos.requests import DrillRequest

SILENCE_S = 150.0
"""Longest silence of a server. It exceeds the deadline of a request (`router.request_timeout_s`), so that a
server always has the last word."""
CONNECT_S = 5.0
AGAIN_S, AGAIN_MAX_S = 0.5, 2.0
"""Time until the next attempt, unless the server names another; and its bound, so that a drill ends."""
FINAL_STATUSES = frozenset(range(400, 500)) - {408, 409, 425, 429}
STREAM_END = b"[DONE]"


class Clients:
    def __init__(
        self, urls: Sequence[str], *, attempts_max: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`transport` takes the place of connections."""
        self._urls, self._attempts_max = tuple(urls), attempts_max
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, transport=transport)
        self.in_flight = 0

    async def ask(self, ask: DrillRequest, on_ended: Callable[[AskedRequest], None]) -> AskedRequest:
        """Ask until there is an answer, an error that asking again cannot change, or no attempt left."""
        attempts: list[ClientAttempt] = []
        body = orjson.dumps(ask.body)
        self.in_flight += 1
        try:
            while len(attempts) < self._attempts_max:
                url = self._urls[(ask.index + len(attempts)) % len(self._urls)]
                attempts.append(attempt := await self._attempt(ask, url, body))
                if attempt.end is End.ANSWERED or attempt.is_final:
                    break
                await asyncio.sleep(min(attempt.retry_after_s or AGAIN_S, AGAIN_MAX_S))
        finally:
            self.in_flight -= 1
        asked = AskedRequest(ask.index, ask.kind, tuple(attempts))
        on_ended(asked)
        return asked

    async def _attempt(self, ask: DrillRequest, url: str, body: bytes) -> ClientAttempt:
        heard = HeardStream(url, time.monotonic())
        try:
            headers = {"content-type": "application/json"}
            async with self._http.stream("POST", url + ask.path, content=body, headers=headers) as response:
                await _read(heard, response, is_stream=ask.is_stream)
        except httpx.ReadTimeout:
            heard.end, heard.detail = End.UNANSWERED, f"silent for {SILENCE_S:g} s"
        except httpx.ConnectTimeout:
            heard.end, heard.detail = End.NOT_CONNECTED, "no connection"
        except httpx.ConnectError as error:
            heard.end, heard.detail = End.NOT_CONNECTED, str(error)
        except httpx.TransportError as error:
            heard.end, heard.detail = End.BROKEN, f"{type(error).__name__} {error}"
        except orjson.JSONDecodeError as error:
            heard.end, heard.detail = End.GARBAGE, f"not JSON: {error}"
        return heard.attempt(time.monotonic())

    async def close(self) -> None:
        await self._http.aclose()


class HeardStream:
    """What one attempt has heard so far."""

    def __init__(self, url: str, now_s: float) -> None:
        self._url, self._began_s = url, now_s
        self._heard_s = now_s
        self._first_s: float | None = None
        self._pause = Stretch(now_s, now_s)
        self.end, self.detail, self.status, self.retry_after_s = End.BROKEN, "the stream ended early", 0, 0.0
        self.answer = HeardAnswer()

    def event(self, data: bytes, now_s: float) -> bool:
        """Take in one event. Returns whether it is the last."""
        if data == STREAM_END:
            self.end, self.detail = End.ANSWERED, ""
            return True
        value = orjson.loads(data)
        if value.get("error") is not None:
            self.end, self.detail = End.ERROR, str(value["error"].get("message", value["error"]))[:200]
            return True
        if self.answer.hear(value):
            if self._first_s is None:
                self._first_s = now_s
            elif now_s - self._heard_s > self._pause.length_s:
                self._pause = Stretch(self._heard_s, now_s)
            self._heard_s = now_s
        return False

    def refused(self, response: httpx.Response, body: bytes) -> None:
        self.status = response.status_code
        self.end = End.REFUSED if self.status in (429, 503) else End.ERROR
        self.retry_after_s = float(response.headers.get("retry-after") or 0)
        try:
            self.detail = f"{self.status}: {orjson.loads(body)['error']['message']}"[:200]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            self.detail = f"{self.status}: {body[:200]!r}, which is no error object"

    def attempt(self, now_s: float) -> ClientAttempt:
        began_s, first_s = self._began_s, self._first_s
        return ClientAttempt(
            router=self._url,
            began_s=began_s,
            ended_s=now_s,
            end=self.end,
            detail=self.detail,
            is_final=self.status in FINAL_STATUSES,
            retry_after_s=self.retry_after_s,
            first_wait=Stretch(began_s, now_s if first_s is None else first_s),
            pause=self._pause,
            answer=msgspec.structs.replace(self.answer),
        )


async def _read(heard: HeardStream, response: httpx.Response, *, is_stream: bool) -> None:
    if response.status_code != 200:
        heard.refused(response, await response.aread())
        return
    if not is_stream:
        heard.event(await response.aread(), time.monotonic())
        if heard.end is not End.ERROR:
            heard.event(STREAM_END, time.monotonic())
        return
    rest = b""
    async for data in response.aiter_bytes():  # aiter_lines would cut text at U+0085 and its like
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and heard.event(line[5:].strip(), time.monotonic()):
                return
