"""The front ends that peers are measured behind, with fake servers."""

import asyncio
import contextlib
import itertools

import orjson
import pytest

from benchmarks.proxies import prefill_decode, round_robin

REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
)


def http(body, status=200):
    return (
        f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


@contextlib.asynccontextmanager
async def a_server(answer, seen):
    """Answer each request with `answer(body)`; `seen` gets the bodies."""

    async def handle(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            request = await prefill_decode.read_request(reader)
            seen.append(request.body)
            writer.write(answer(request.body))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield ("127.0.0.1", server.sockets[0].getsockname()[1])


async def talk(address, body):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(REQUEST % (len(body), body))
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@contextlib.asynccontextmanager
async def prefill_decode_front(prefill, decode):
    async def handle(reader, writer):
        await prefill_decode.handle(prefill, decode, reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


async def test_the_decode_server_gets_the_request_with_where_its_kv_is():
    asked, decoded = [], []
    params = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]]}
    async with (
        a_server(lambda _: http(orjson.dumps({"kv_transfer_params": params})), asked) as prefill,
        a_server(lambda _: http(b"data: [DONE]\n\n"), decoded) as decode,
        prefill_decode_front(prefill, decode) as front,
    ):
        body = {"prompt": "w1", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
        answer = await talk(front, orjson.dumps(body))
    assert answer.endswith(b"data: [DONE]\n\n")
    assert orjson.loads(asked[0]) == {
        "prompt": "w1",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": prefill_decode.REMOTE_DECODE,
    }
    assert orjson.loads(decoded[0]) == body | {"kv_transfer_params": params}


@pytest.mark.parametrize(
    ("prefilled", "status"),
    [(http(b'{"error":"no room"}', 503), 503), (http(b'{"choices":[]}'), 502), (b"nonsense\r\n\r\n", 502)],
    ids=["refused", "without parameters", "not HTTP"],
)
async def test_what_prefill_refuses_reaches_the_client_and_not_decode(prefilled, status):
    decoded = []
    async with (
        a_server(lambda _: prefilled, []) as prefill,
        a_server(lambda _: http(b"{}"), decoded) as decode,
        prefill_decode_front(prefill, decode) as front,
    ):
        answer = await talk(front, b'{"prompt": "w1"}')
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert decoded == []


async def test_a_body_that_is_not_json_is_a_400():
    async with (
        a_server(lambda _: http(b"{}"), []) as server,
        prefill_decode_front(server, server) as front,
    ):
        assert (await talk(front, b"{")).startswith(b"HTTP/1.1 400 ")


@contextlib.asynccontextmanager
async def round_robin_front(*servers):
    turns, dialling = itertools.cycle(servers), set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: round_robin.ProxiedClient(turns, dialling), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


async def test_connections_go_to_the_servers_in_turn_with_every_byte():
    one, two = [], []
    large = b"x" * 3_000_000
    async with (
        a_server(lambda body: http(b"one" + body), one) as first,
        a_server(lambda body: http(b"two" + body), two) as second,
        round_robin_front(first, second) as front,
    ):
        answers = [await talk(front, b"%d" % i + large) for i in range(4)]
    assert [a.split(b"\r\n\r\n", 1)[1][:4] for a in answers] == [b"one0", b"two1", b"one2", b"two3"]
    assert all(a.endswith(large) for a in answers)
    assert (len(one), len(two)) == (2, 2)


async def test_a_server_that_is_gone_costs_its_turn_and_no_more():
    seen = []
    async with a_server(lambda _: http(b"{}"), seen) as alive:
        async with a_server(lambda _: http(b"{}"), []) as gone:
            pass
        async with round_robin_front(gone, alive) as front:
            answers = []
            for _ in range(4):
                try:
                    answers.append(await talk(front, b"{}"))
                except ConnectionError:
                    answers.append(b"")
    assert [bool(a) for a in answers] == [False, True, False, True]
