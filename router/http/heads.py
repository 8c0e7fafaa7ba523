"""Checks of a request's head (RFC 9112) that go beyond its grammar, which the parser checks. Pure.

A head is refused wherever two servers could read it differently: behind a proxy, such a difference lets a
client smuggle requests (RFC 9112, section 11.2).
"""

import re
from http import HTTPStatus
from typing import NamedTuple

import httptools

Headers = list[tuple[bytes, bytes]]

VERSIONS = frozenset({"1.0", "1.1"})

_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-fv.:%]+\])(?::[0-9]*)?")
"""Host and port (RFC 9110, section 7.2). The host may be empty where the target has no authority."""


class RefusedHead(Exception):
    """The head is refused with a status and a message for the client."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class CheckedHead(NamedTuple):
    target: bytes
    """Path and query of the request's target."""
    expects_continue: bool


def check_head(method: bytes, target: bytes, version: str, headers: Headers) -> CheckedHead:
    """Check a head, whose header names are in lower case. A `host` header is replaced by the authority of an
    absolute target (RFC 9112, section 3.2.2). Raises RefusedHead."""
    if version not in VERSIONS:
        raise RefusedHead(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "the HTTP version must be 1.0 or 1.1")
    if method == b"CONNECT":
        raise RefusedHead(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not allowed: this server is no proxy")
    _check_host(version, headers)
    _check_transfer_coding(version, headers)
    return CheckedHead(_origin_form(method, target, headers), _expects_continue(version, headers))


def without_upgrade(headers: Headers) -> Headers:
    """Return the headers without the offer of another protocol, which a server may ignore (RFC 9110, section
    7.8)."""
    return [(name, value) for name, value in headers if name != b"upgrade"]


def head_bytes(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """Return a head as a client writes it."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _values(name: bytes, headers: Headers) -> list[bytes]:
    return [value.strip(b" \t") for key, value in headers if key == name]


def _check_host(version: str, headers: Headers) -> None:
    hosts = _values(b"host", headers)
    if not hosts and version == "1.1":
        raise _bad("a request of HTTP/1.1 must have a Host header")
    if len(hosts) > 1:
        raise _bad("there is more than one Host header")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise _bad("the Host header is no host")


def _check_transfer_coding(version: str, headers: Headers) -> None:
    codings = _values(b"transfer-encoding", headers)
    if not codings:
        return
    if version == "1.0":
        raise _bad("Transfer-Encoding is not allowed in HTTP/1.0")
    if len(codings) > 1 or codings[0].lower() != b"chunked":
        raise RefusedHead(
            HTTPStatus.NOT_IMPLEMENTED, "Transfer-Encoding must be chunked: no other coding is understood"
        )


def _expects_continue(version: str, headers: Headers) -> bool:
    """Return whether the client waits for "100 Continue". A client of HTTP/1.0 cannot (RFC 9110, section
    10.1.1)."""
    expected = _values(b"expect", headers)
    if not expected or version == "1.0":
        return False
    if any(value.lower() != b"100-continue" for value in expected):
        raise RefusedHead(HTTPStatus.EXPECTATION_FAILED, "Expect may only be 100-continue")
    return True


def _origin_form(method: bytes, target: bytes, headers: Headers) -> bytes:
    """Return path and query of a target in any of its forms (RFC 9112, section 3.2)."""
    if b"#" in target:
        raise _bad("the request's target has a fragment")
    if target.startswith(b"/"):
        return target
    if target == b"*":
        if method != b"OPTIONS":
            raise _bad("the target * is for OPTIONS only")
        return target
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise _bad("the request's target is no URL") from None
    scheme, _, rest = target.partition(b"://")
    authority = re.split(rb"[/?]", rest, maxsplit=1)[0]
    if scheme.lower() not in (b"http", b"https") or not url.host or not _HOST.fullmatch(authority):
        raise _bad("the request's target is no http URL without user information")
    headers[:] = [header for header in headers if header[0] != b"host"] + [(b"host", authority)]
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


def _bad(message: str) -> RefusedHead:
    return RefusedHead(HTTPStatus.BAD_REQUEST, f"invalid HTTP request: {message}")
