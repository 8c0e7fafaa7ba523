"""The dashboard reads the body of a request that offers another protocol."""

import pytest

from baton.config import Config
from control_plane.dashboard.process import _server
from tests.http_in_memory import RecordingApp, exchange, splits

BODY = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("split", ["one", "two", "bytes"])
@pytest.mark.parametrize("token", [b"h2c", b"foo"])
async def test_an_upgrade_is_ignored_and_the_body_read(token, split):
    protocol = _server(RecordingApp(), Config()).config.http_protocol_class
    head = b"POST /login HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\n" % token
    data = head + b"Content-Length: %d\r\n\r\n%bGET /next HTTP/1.1\r\nHost: x\r\n\r\n" % (len(BODY), BODY)
    found = await exchange(protocol, splits(data)[split])
    assert [(one.target, one.body) for one in found.seen] == [(b"/login", BODY), (b"/next", b"")]
