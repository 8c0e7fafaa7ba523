"""Where a request ends is never in doubt, however its bytes arrive and whatever its headers say."""

import logging

import pytest

from router.http.protocol import PIPELINED_MAX, BoundedProtocol
from tests.http_in_memory import exchange, splits

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"model": "tiny"}'
SIZED = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

SPLITS = ("one", "two", "bytes")


async def told(data, split):
    return await exchange(BoundedProtocol, splits(data)[split])


def targets(found):
    return [one.target for one in found.seen]


UPGRADES = {
    "h2c": b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "java": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "tls": b"Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
    "token": b"uPGRADE: foo/2, bar\r\ncONNECTION:UPGRADE\r\n",
    "twice": b"Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\n",
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("framed", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
async def test_an_upgrade_is_ignored_and_the_body_read(upgrade, framed, split):
    found = await told(POST + upgrade + framed + SECOND, split)
    assert [(one.method, one.target, one.body) for one in found.seen] == [
        ("POST", b"/v1/chat/completions", BODY),
        ("GET", b"/second", b""),
    ]
    assert found.statuses == [200, 200]
    assert not found.is_ended


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
async def test_the_body_of_an_upgrade_is_no_request(upgrade, split):
    sized = b"Content-Length: %d\r\n\r\n%b" % (len(SMUGGLED), SMUGGLED)
    found = await told(POST + upgrade + sized + SECOND, split)
    assert targets(found) == [b"/v1/chat/completions", b"/second"]
    assert found.seen[0].body == SMUGGLED


@pytest.mark.parametrize("split", SPLITS)
async def test_upgrades_of_requests_without_a_body_are_ignored(split):
    found = await told((b"GET /a HTTP/1.1\r\nHost: x\r\n" + UPGRADES["h2c"] + b"\r\n") * 3 + SECOND, split)
    assert targets(found) == [b"/a", b"/a", b"/a", b"/second"]


async def test_an_upgrade_keeps_the_rest_of_the_head():
    head = (
        b"POST /p?q=1 HTTP/1.1\r\nHost: x\r\nA: 1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\nA: 2\r\n"
    )
    found = await told(head + SIZED, "one")
    (one,) = found.seen
    assert one.target == b"/p?q=1"
    assert [value for name, value in one.headers if name == b"a"] == [b"1", b"2"]
    assert b"connection: close" in found.answer
    assert found.is_ended


@pytest.mark.parametrize("split", SPLITS)
async def test_an_upgrade_of_http_1_0_is_ignored(split):
    found = await told(b"POST /p HTTP/1.0\r\n" + UPGRADES["h2c"] + SIZED, split)
    assert [one.body for one in found.seen] == [BODY]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES["h2c"]], ids=["plain", "h2c"])
async def test_connect_is_refused_and_nothing_after_it_read(upgrade, split):
    data = b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n" + upgrade + b"Content-Length: 3\r\n\r\nabc" + SMUGGLED
    found = await told(data, split)
    assert found.seen == []
    assert found.statuses == [405]
    assert b"allow: GET, HEAD, POST" in found.answer
    assert found.is_ended


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "trailer",
    [
        b"Authorization: Bearer stolen\r\n",
        b"X-Request-Id: other\r\n",
        b"Host: other\r\n",
        b"Expect: nothing\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    ],
)
async def test_trailers_are_no_headers(trailer, split):
    data = POST + CHUNKED.removesuffix(b"\r\n") + trailer + b"\r\n"
    found = await told(data + SECOND, split)
    assert targets(found) == [b"/v1/chat/completions", b"/second"]
    assert found.seen[0].headers == ((b"host", b"x"), (b"transfer-encoding", b"chunked"))
    assert found.seen[1].headers == ((b"host", b"x"),)


@pytest.mark.parametrize("split", SPLITS)
async def test_a_connection_ends_when_a_trailer_ends_it(split):
    """The parser reads no request after such a trailer, so the client may not go on waiting for one."""
    found = await told(POST + CHUNKED.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n" + SECOND, split)
    assert targets(found) == [b"/v1/chat/completions"]
    assert found.is_ended


REFUSED_HEADS = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "no host, upgrade": (b"GET / HTTP/1.1\r\n" + UPGRADES["h2c"] + b"\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    "two hosts, 1.0": (b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    "host of two": (b"GET / HTTP/1.1\r\nHost: x, y\r\n\r\n", 400),
    "host with a path": (b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n", 400),
    "host with a user": (b"GET / HTTP/1.1\r\nHost: x@y\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "two different lengths": (POST + b"Content-Length: 3\r\nContent-Length: 0\r\n\r\nabc", 400),
    "a list of lengths": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "a signed length": (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    "an endless length": (POST + b"Content-Length: 99999999999999999999999\r\n\r\nabc", 400),
    "a length with a gap": (POST + b"Content-Length: 3 4\r\n\r\nabc", 400),
    "length and chunks": (POST + b"Content-Length: 3\r\n" + CHUNKED, 400),
    "chunks and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\n" + CHUNKED, 400),
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked, gzip": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", 501),
    "xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "chunks in 1.0": (b"POST / HTTP/1.0\r\nHost: x\r\n" + CHUNKED, 400),
    "obs-fold": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
    "folded first": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "space before colon": (POST + b"Content-Length : 3\r\n\r\nabc", 400),
    "tab before colon": (POST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "bare LF between headers": (b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400),
    "bare CR in a value": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n", 400),
    "bare CR at the end": (b"GET / HTTP/1.1\r\nHost: x\r\rA: b\r\n\r\n", 400),
    "NUL": (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nHost: x\r\nabc\r\n\r\n", 400),
    "0.9": (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505),
    "2.0": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "1.2": (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 400),
    "preface of 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "expectation, upgrade": (POST + UPGRADES["h2c"] + b"Expect: miracles\r\n" + SIZED, 417),
    "gzip, chunked, upgrade": (
        POST + UPGRADES["h2c"] + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "expectation": (POST + b"Expect: miracles\r\n" + SIZED, 417),
    "fragment": (b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no target": (b"GET foo HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "star": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another scheme": (b"GET ftp://x/a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a user in the target": (b"GET http://u:p@x/a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no host in the target": (b"GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("data", "status"), REFUSED_HEADS.values(), ids=REFUSED_HEADS)
async def test_heads_that_can_be_read_in_two_ways_are_refused(data, status, split):
    found = await told(data + SMUGGLED, split)
    assert found.seen == []
    assert found.statuses == [status]
    assert b"connection: close" in found.answer
    assert found.is_ended


CHUNK_HEAD = POST + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED_CHUNKS = {
    "0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "sign": b"+3\r\nabc\r\n0\r\n\r\n",
    "space": b"3 \r\nabc\r\n0\r\n\r\n",
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "more than 64 bits": b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "endless size": b"f" * 40 + b"\r\nabc\r\n0\r\n\r\n",
    "LF after size": b"3\nabc\r\n0\r\n\r\n",
    "LF in extension": b"3;a\nabc\r\n0\r\n\r\n",
    "CR in extension": b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "line in a quoted extension": b'3;a="\r\nabc\r\n0\r\n\r\n',
    "LF after data": b"3\r\nabc\n0\r\n\r\n",
    "longer data": b"3\r\nabcde0\r\n\r\n",
    "shorter data": b"5\r\nabc\r\n0\r\n\r\n",
    "LF at the end": b"3\r\nabc\r\n0\n\n",
    "length in a trailer": b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "coding in a trailer": b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("chunks", REFUSED_CHUNKS.values(), ids=REFUSED_CHUNKS)
async def test_chunks_that_can_be_read_in_two_ways_are_refused(chunks, split):
    found = await told(CHUNK_HEAD + chunks + SMUGGLED, split)
    assert found.seen == []
    assert found.statuses == [400]
    assert found.is_ended


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "chunks",
    [
        b"3;name=value\r\nabc\r\n0;last\r\n\r\n",
        b'3;name="quoted; \\" value"\r\nabc\r\n0\r\n\r\n',
        b"0003\r\nabc\r\n000\r\n\r\n",
        b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n",
    ],
)
async def test_chunk_extensions_are_dropped(chunks, split):
    found = await told(CHUNK_HEAD + chunks + SECOND, split)
    assert [one.body for one in found.seen] == [b"abc", b""]


async def test_a_huge_chunk_waits_for_its_bytes_and_no_other_request_is_seen():
    found = await told(CHUNK_HEAD + b"ffffffffffffffff\r\n" + SMUGGLED, "one")
    assert found.seen == []
    assert found.statuses == []


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://y/p?q", b"/p?q", b"y"),
        (b"HTTPS://y:8000/p", b"/p", b"y:8000"),
        (b"http://y", b"/", b"y"),
        (b"http://y?q", b"/?q", b"y"),
        (b"http://[::1]:80//p", b"//p", b"[::1]:80"),
    ],
)
async def test_an_absolute_target_names_path_and_host(target, path, host, split):
    found = await told(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target + SECOND, split)
    assert targets(found) == [path, b"/second"]
    assert [value for name, value in found.seen[0].headers if name == b"host"] == [host]


@pytest.mark.parametrize("split", SPLITS)
async def test_a_client_that_expects_it_is_told_to_continue(split):
    found = await told(POST + b"Expect: 100-Continue\r\n" + SIZED, split)
    assert found.statuses == [100, 200]
    assert [one.body for one in found.seen] == [BODY]


async def test_a_client_of_http_1_0_is_not_told_to_continue():
    found = await told(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\n" + SIZED, "one")
    assert found.statuses == [200]


@pytest.mark.parametrize("split", SPLITS)
async def test_requests_before_a_refused_one_are_answered(split):
    good = POST + SIZED
    found = await told(good + SECOND + b"GET / HTTP/1.1\r\n\r\n" + SMUGGLED, split)
    assert targets(found) == [b"/v1/chat/completions", b"/second"]
    assert found.statuses == [200, 200, 400]
    assert found.is_ended


@pytest.mark.parametrize("split", SPLITS)
async def test_requests_before_a_refused_body_are_answered(split):
    found = await told(SECOND + CHUNK_HEAD + b"3\r\nabcdef\r\n" + SMUGGLED, split)
    assert targets(found) == [b"/second"]
    assert found.statuses == [200, 400]
    assert found.is_ended


@pytest.mark.parametrize("split", SPLITS)
async def test_nothing_is_read_after_the_last_request_of_a_connection(split):
    found = await told(b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + SMUGGLED, split)
    assert targets(found) == [b"/a"]
    assert found.statuses == [200]
    assert found.is_ended


async def early(scope, receive, send):
    """Answer before the body is there, as for a wrong key."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_a_request_has_one_answer_even_if_its_body_turns_out_malformed():
    early.seen = []
    found = await exchange(BoundedProtocol, [CHUNK_HEAD, b"XYZ\r\n", SMUGGLED], early)
    assert found.statuses == [401]
    assert found.is_ended


async def test_nobody_is_warned_of_an_upgrade(caplog):
    await told(POST + UPGRADES["websocket"] + SIZED, "two")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("upgrade", [b"", UPGRADES["h2c"]], ids=["plain", "h2c"])
async def test_what_one_segment_makes_the_server_do_is_bounded(upgrade):
    request = b"GET /a HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
    allowed = 1 + PIPELINED_MAX
    found = await exchange(BoundedProtocol, [request * allowed])
    assert found.statuses == [200] * allowed
    found = await exchange(BoundedProtocol, [request * 2000])
    assert len(found.seen) == allowed
    assert found.statuses == [200] * allowed + [429]
    assert found.is_ended
