"""A differential fuzzer of HTTP: our server against itself in other segmentations, and against h11.

    python -m tests.fuzz.http --seconds 3600

Two servers that see different requests in the same bytes let a client smuggle requests past one of them. Our
server may refuse more than h11 does; it must never see a request, or a body, that h11 does not see.
"""

import argparse
import asyncio
import os
import re
import time
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from random import Random

import h11
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.protocol import BoundedProtocol
from tests.http_in_memory import Exchange, bytewise, exchange

CORPUS = Path(__file__).parent / "corpus" / "http"
FOUND = Path(os.environ.get("BATON_FUZZ_FOUND", "/tmp/baton-fuzz"))
"""Folder for cases that showed a defect."""
BYTES_MAX = 600
FINDINGS_MAX = 20

Server = type[HttpToolsProtocol]

TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"\0",
    b"\x0b",
    b"\x0c",
    b"\x7f",
    b"\x80",
    b"\xa0",
    b"0",
    b"1",
    b"9",
    b"f",
    b'"',
    b"\\",
    b"#",
    b"?",
    b"%00",
    b"%0d%0a",
    b"/",
    b"//",
    b"@",
    b"*",
    b"0\r\n\r\n",
    b"\r\n\r\n",
    b"3\r\nabc\r\n",
    b";a=b",
    b';a="\r\n"',
    b"Host: x\r\n",
    b"Host: y\r\n",
    b"Host:\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: 40\r\n",
    b"Content-Length: 03\r\n",
    b"Content-Length: 3,3\r\n",
    b"content-length : 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, \r\n",
    b"Transfer_Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: x, upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: 200-ok\r\n",
    b"Trailer: A\r\n",
    b"A: b\r\n",
    b"A:\r\n",
    b" folded\r\n",
    b"GET ",
    b"POST ",
    b"CONNECT ",
    b"OPTIONS * ",
    b"HEAD ",
    b"PRI * HTTP/2.0",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.10",
    b"http://y/p",
    b"https://",
    b"GET /s HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /s HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
]


def corpus() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.glob("*.raw"))]


class Generator:
    """Requests made from the corpus by splicing and mutation, all drawn from one seed."""

    def __init__(self, seeds: list[bytes], random: Random) -> None:
        self._seeds, self._random = seeds, random

    def next(self) -> bytes:
        random = self._random
        data = random.choice(self._seeds)
        while random.random() < 0.3:
            data += random.choice(self._seeds)
        for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 5))):
            data = self._mutated(data)
        return data[:BYTES_MAX]

    def segments(self, data: bytes) -> list[bytes]:
        """Return the bytes in segments cut at random."""
        random = self._random
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((1, 1, 2, 5))))
        ends = [0, *cuts, len(data)]
        return [data[a:b] for a, b in pairwise(ends) if b > a]

    def _mutated(self, data: bytes) -> bytes:
        random = self._random
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 1, 2, 4, 16)))
        match random.randrange(8):
            case 0 | 1:
                return data[:at] + random.choice(TOKENS) + data[at:]
            case 2:
                return data[:at] + random.choice(TOKENS) + data[end:]
            case 3:
                return data[:at] + data[end:]
            case 4:
                return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
            case 5:
                return data[:end] + data[at:end] + data[end:]
            case 6:  # A header line goes to where another one begins.
                lines = data.split(b"\r\n")
                lines.insert(random.randrange(len(lines)), random.choice(lines))
                return b"\r\n".join(lines)
            case _:
                lines = data.split(b"\r\n")
                lines.insert(random.randrange(len(lines)), random.choice(TOKENS).removesuffix(b"\r\n"))
                return b"\r\n".join(lines)


# --- what is compared -----------------------------------------------------------------------------

Request = tuple[str, bytes, bytes]
"""Method, path with query, body."""

_REQUEST_LINE = re.compile(rb"([A-Z-]+) +(\S+) +(HTTP/\d\.\d\r\n)")


def requests_of(found: Exchange) -> list[Request]:
    return [(one.method, one.target, one.body) for one in found.seen]


def expected_of(data: bytes) -> list[Request]:
    """Return the requests that h11 reads, up to the first that is incomplete or that it refuses. Blank lines
    before a request and several spaces in its first line are made plain: our parser overlooks them, and they
    change no framing."""
    found: list[Request] = []
    while data := data.lstrip(b"\r\n"):
        line = _REQUEST_LINE.match(data)
        if line is not None:
            data = b" ".join(line.groups()) + data[line.end() :]
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(data)
        try:
            request, body = connection.next_event(), b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            break
        if not isinstance(request, h11.Request) or not isinstance(event, h11.EndOfMessage):
            break
        if request.http_version not in (b"1.0", b"1.1"):
            break
        found.append((request.method.decode(), _origin_form(request.target), body))
        if connection.their_state is h11.MUST_CLOSE:
            break
        data = connection.trailing_data[0]
    return found


def _origin_form(target: bytes) -> bytes:
    """Return path and query. ASGI does not tell an empty query from none."""
    plain = re.sub(rb"^(?i:https?)://[^/?]*", b"", target)
    path, _, query = plain.partition(b"?")
    path = path if path.startswith(b"/") or path == b"*" else b"/" + path
    return path + (b"?" + query if query else b"")


async def problem_of(data: bytes, segmentations: list[list[bytes]], server: Server = BoundedProtocol) -> str:
    """Return what is wrong with the server's reading of the bytes; empty: nothing."""
    mine = await exchange(server, [data])
    for segments in segmentations:
        other = await exchange(server, segments)
        if (other.seen, final_statuses(other)) != (mine.seen, final_statuses(mine)):
            return f"in one segment {_told(mine)}, in {len(segments)} {_told(other)}"
    final = final_statuses(mine)
    if any(status >= 500 and status not in (501, 505) for status in final):
        return f"a defect: {_told(mine)}"
    if len(final) > len(mine.seen) + 1:
        return f"more answers than requests: {_told(mine)}"
    seen, expected = requests_of(mine), expected_of(data)
    if seen == expected[: len(seen)] and (len(seen) == len(expected) or mine.is_ended):
        return ""
    return f"ours {_told(mine)}, h11's {expected}"


def final_statuses(found: Exchange) -> list[int]:
    """Return the statuses without 100 (Continue), which depends on how much of a body has come already."""
    return [status for status in found.statuses if status >= 200]


def _told(found: Exchange) -> str:
    return f"{requests_of(found)} {found.statuses}"


async def smaller(data: bytes, server: Server) -> bytes:
    """Return a shorter case that is still a finding."""
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if shorter and await problem_of(shorter, [bytewise(shorter)], server):
                data = shorter
            else:
                at += size
        size //= 2
    return data


async def fuzz(
    seed: int, *, seconds: float = 0.0, cases: int = 0, server: Server = BoundedProtocol
) -> dict[bytes, str]:
    """Run cases until the time is over or their number is reached. Returns what is wrong, by its case."""
    random = Random(seed)
    generator = Generator(corpus(), random)
    findings: dict[bytes, str] = {}
    began_s, count, told_s = time.monotonic(), 0, 0.0
    while (count < cases if cases else time.monotonic() - began_s < seconds) and len(findings) < FINDINGS_MAX:
        data = generator.next()
        count += 1
        if not data:
            continue
        segmentations = [generator.segments(data)]
        if count % 8 == 0:
            segmentations.append(bytewise(data))
        if problem := await problem_of(data, segmentations, server):
            data = await smaller(data, server)
            problem = await problem_of(data, [bytewise(data)], server) or problem
            findings[data] = problem
            print(f"finding: {data!r}\n    {problem}", flush=True)
        if not cases and time.monotonic() - began_s - told_s > 60:
            told_s = time.monotonic() - began_s
            print(f"{told_s:.0f} s: {count} cases, {len(findings)} findings", flush=True)
    if not cases:
        print(f"seed {seed}: {count} cases, {len(findings)} findings", flush=True)
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=Path, default=None, help="a file with the bytes of one case")
    options = parser.parse_args()
    if options.case is not None:
        data = options.case.read_bytes()
        print(asyncio.run(problem_of(data, [bytewise(data)])) or "nothing is wrong")
        return
    seed = int(time.time()) if options.seed is None else options.seed
    findings = asyncio.run(fuzz(seed, seconds=options.seconds))
    for data in findings:
        FOUND.mkdir(exist_ok=True, parents=True)
        (FOUND / f"http-{blake2b(data, digest_size=8).hexdigest()}.raw").write_bytes(data)
    raise SystemExit(1 if findings else 0)


if __name__ == "__main__":
    main()
