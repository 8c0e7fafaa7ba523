"""The closed loop keeps its concurrency, counts correctly, and does not compare failures."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import orjson
import pytest

from baton.core.errors import SetupError
from benchmarks import closed_loop
from benchmarks.closed_loop import ClosedLoopLoad, LoadResult
from loadgen.client import parse_url

LOAD = ClosedLoopLoad(
    concurrency=3, requests=12, prompt_tokens=5, output_tokens=4, first_token=10, end_token=20
)


class FakeServer:
    """Streams `max_tokens` one-word events, and fails request `fail_at`. `is_transformers` streams in chunks
    without `[DONE]`; `breaks_off` also leaves out the last chunk."""

    def __init__(self, *, fail_at=None, cut_to=None, is_transformers=False, breaks_off=False):
        self.is_transformers, self.breaks_off = is_transformers, breaks_off
        self.fail_at, self.cut_to = fail_at, cut_to
        self.bodies = []
        self.now = self.most = 0

    async def serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        self.bodies.append(body)
        number = len(self.bodies)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        if number == self.fail_at:
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")
        else:
            chunked = b"Transfer-Encoding: chunked\r\n" if self.is_transformers else b""
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + chunked + b"\r\n")
            count = self.cut_to or body["max_tokens"]
            for _ in range(count):
                self._event(writer, {"choices": [{"text": " w", "finish_reason": None}]})
            usage = {"completion_tokens": count, "prompt_tokens": len(body["prompt"])}
            self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
            if not self.is_transformers:
                writer.write(b"data: [DONE]\n\n")
            elif not self.breaks_off:
                writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.now -= 1
        writer.close()

    def _event(self, writer, value):
        data = b"data: " + orjson.dumps(value) + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_transformers else data)


@asynccontextmanager
async def listening(fake):
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield parse_url(f"http://127.0.0.1:{port}")


async def test_every_request_is_sent_once_with_a_prompt_of_its_own():
    fake = FakeServer()
    async with listening(fake) as server:
        result = await closed_loop.run(server, "m", LOAD, seed=1)
    prompts = {tuple(body["prompt"]) for body in fake.bodies}
    assert len(fake.bodies) == len(prompts) == 12
    assert all(len(p) == 5 and min(p) >= 10 and max(p) < 20 for p in prompts)
    assert fake.most <= 3
    assert result.requests == 12
    assert result.output_tokens_per_s == pytest.approx(12 * 4 / result.duration_s)


async def test_another_seed_sends_other_prompts():
    first, second = FakeServer(), FakeServer()
    for fake, seed in ((first, 1), (second, 2)):
        async with listening(fake) as server:
            await closed_loop.run(server, "m", LOAD, seed=seed)
    assert {tuple(b["prompt"]) for b in first.bodies}.isdisjoint(tuple(b["prompt"]) for b in second.bodies)


@pytest.mark.parametrize(
    "fake", [FakeServer(fail_at=5), FakeServer(cut_to=2)], ids=["failure", "short answer"]
)
async def test_a_run_with_a_failure_or_a_short_answer_is_no_result(fake):
    async with listening(fake) as server:
        with pytest.raises(SetupError, match="request"):
            await closed_loop.run(server, "m", LOAD, seed=1)


async def test_a_server_of_another_dialect_gets_words_and_only_fields_it_knows():
    """The fields are those that `transformers serve` 5.23 takes; HTTP alone marks the end."""
    fake = FakeServer(is_transformers=True)
    async with listening(fake) as server:
        server = replace(server, says_done=False)
        load = msgspec.structs.replace(LOAD, dialect="transformers")
        result = await closed_loop.run(server, "m", load, seed=1)
    assert result.output_tokens_per_s == pytest.approx(12 * 4 / result.duration_s)
    known = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "generation_config"}
    for body in fake.bodies:
        assert set(body) <= known
        words = body["prompt"].split(" ")
        assert len(words) == 5
        assert all(10 <= int(word.removeprefix("w")) < 20 for word in words)
        assert orjson.loads(body["generation_config"])["eos_token_id"] == -1


async def test_an_answer_that_breaks_off_is_no_result_without_done_either():
    fake = FakeServer(is_transformers=True, breaks_off=True)
    async with listening(fake) as server:
        with pytest.raises(SetupError, match="broke off"):
            await closed_loop.run(replace(server, says_done=False), "m", LOAD, seed=1)


def test_medians_are_taken_field_by_field():
    rounds = [LoadResult(1, 4, *(float(v) for v in values)) for values in ([1] * 6, [9] * 6, [2] * 6)]
    assert closed_loop.median_of(rounds) == LoadResult(1, 4, *[2.0] * 6)
