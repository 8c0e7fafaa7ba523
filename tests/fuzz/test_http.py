"""Short runs of the HTTP fuzzer, with the same cases each time."""

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.fuzz.http import CORPUS, corpus, fuzz, problem_of
from tests.http_in_memory import bytewise


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_request_is_read_as_another_server_reads_it(seed):
    assert await fuzz(seed, cases=1000) == {}


async def test_nothing_is_wrong_with_the_corpus():
    for data in corpus():
        assert await problem_of(data, [bytewise(data)]) == "", data


async def test_the_fuzzer_sees_that_uvicorns_own_server_splits_requests():
    data = (CORPUS / "smuggled.raw").read_bytes()
    assert "h11's [('POST'" in await problem_of(data, [], HttpToolsProtocol)
    assert await fuzz(1, cases=60, server=HttpToolsProtocol)
