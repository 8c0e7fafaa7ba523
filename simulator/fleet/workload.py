"""Requests as they come: from a plan of a trace, copied as often as a large cluster needs, or drawn."""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from baton.core.ids import BlockHash
from loadgen.lengths import PlannedRequest, ReplayPlan

OWN = 0x6F776E
"""Number with which blocks that only one request has are hashed."""


class FleetRequest(NamedTuple):
    """One request."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """Ids of its trace blocks, the partial one at the end included; empty when nothing is shared."""
    copy: int = 0
    """Number of the trace's copy. Copies of a trace have nothing in common with each other."""
    slo_class: str = ""
    tenant: str = ""


def of_plan(plan: ReplayPlan, *, copies: int = 1, seed: int = 0) -> Iterator[FleetRequest]:
    """Yield requests in order of arrival. Copy k of the trace begins k/copies of its length into it and wraps
    around, and its conversations are its own: the load of as many such clusters, not in step. One copy is in
    memory."""
    requests = plan.requests
    if copies == 1:
        for request in requests:
            yield _fleet_request(request, request.index, request.at_s, 0)
        return
    span_s = requests[-1].at_s + requests[-1].at_s / max(1, len(requests) - 1)
    heap: list[tuple[float, int, int, float]] = []
    rng = Random(f"{seed}/copies")
    for copy in range(copies):
        shift_s = span_s * (copy + rng.random()) / copies if copy else 0.0
        first = next((i for i, r in enumerate(requests) if r.at_s >= shift_s), 0)
        _push(heap, requests, copy, first, first, shift_s, span_s)
    index = 0
    left = [len(requests)] * copies
    firsts = {copy: position for _, copy, position, _ in heap}
    while heap:
        at_s, copy, position, shift_s = heappop(heap)
        yield _fleet_request(requests[position], index, at_s, copy)
        index += 1
        left[copy] -= 1
        if left[copy]:
            _push(heap, requests, copy, (position + 1) % len(requests), firsts[copy], shift_s, span_s)


def _push(
    heap: list[tuple[float, int, int, float]],
    requests: tuple[PlannedRequest, ...],
    copy: int,
    position: int,
    first: int,
    shift_s: float,
    span_s: float,
) -> None:
    at_s = requests[position].at_s - shift_s + (span_s if position < first else 0.0)
    heappush(heap, (max(0.0, at_s), copy, position, shift_s))


def _fleet_request(request: PlannedRequest, number: int, at_s: float, copy: int) -> FleetRequest:
    return FleetRequest(
        number,
        at_s,
        int(request.input_tokens),
        int(request.output_tokens),
        request.hash_ids,
        copy,
        request.slo_class,
        request.tenant,
    )


def poisson(
    *, rate: float, count: int, input_tokens: int, output_tokens: int, seed: int = 0, tenant: str = ""
) -> Iterator[FleetRequest]:
    """Yield requests of uniform lengths that share nothing, `rate` of them per second."""
    rng = Random(f"{seed}/poisson")
    at_s = 0.0
    for index in range(count):
        at_s += rng.expovariate(rate)
        yield FleetRequest(index, at_s, input_tokens, output_tokens, (), tenant=tenant)


def merged(streams: Iterable[Iterator[FleetRequest]]) -> Iterator[FleetRequest]:
    """Merge several streams in order of arrival, numbered anew."""
    iterators = list(streams)
    heap: list[tuple[float, int, FleetRequest]] = []
    for number, stream in enumerate(iterators):
        if (first := next(stream, None)) is not None:
            heappush(heap, (first.at_s, number, first))
    index = 0
    while heap:
        _, number, request = heappop(heap)
        yield request._replace(number=index)
        index += 1
        if (following := next(iterators[number], None)) is not None:
            heappush(heap, (following.at_s, number, following))


class PromptHasher:
    """Block hashes of prompts, from what the trace says of them. Equal prefixes get equal hashes, also where
    an id names a block's own content and not all before it."""

    def __init__(self, *, trace_block_tokens: float, block_tokens: int) -> None:
        """Set up. `trace_block_tokens` need not be whole; 0 means that the trace knows no prefixes."""
        self._block_tokens = block_tokens
        self._per_block = block_tokens / trace_block_tokens if trace_block_tokens else 1.0
        self._last_token = (block_tokens - 1) / trace_block_tokens if trace_block_tokens else 0.0

    def hashes_of(self, request: FleetRequest) -> list[BlockHash]:
        """Return the hashes of the full blocks of a request's prompt."""
        full = request.input_tokens // self._block_tokens
        ids, salt = request.hash_ids, request.copy
        found: list[BlockHash] = []
        chain = hash((salt, -1))
        taken = 0
        for i in range(full):
            # The trace block that holds this block's last token; what it does not cover is the request's own.
            last = int(i * self._per_block + self._last_token + 1e-9)
            if last >= len(ids):
                found += [_name(hash((request.number, n, OWN)), request.number) for n in range(i, full)]
                break
            while taken <= last:
                chain = hash((chain, ids[taken]))
                taken += 1
            found.append(_name(hash((chain, i)), chain))
        return found


def _name(first: int, second: int) -> BlockHash:
    """Return a hash that is spread over all bits, as real hashes are: indexes rely on it."""
    return BlockHash(first.to_bytes(8, "big", signed=True) + second.to_bytes(8, "big", signed=True))


class TraceHashes:
    """The hashes of a prompt's blocks by the trace, in place of hashing its tokens."""

    __slots__ = ("_hashes",)

    def __init__(self, hashes: list[BlockHash]) -> None:
        self._hashes = hashes

    def of(self, tokens: object, fingerprint: str, block_tokens: int) -> list[BlockHash]:
        """Return the prompt's hashes in every case: what is generated has no name in a trace."""
        return self._hashes
