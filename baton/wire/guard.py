"""The check of who may call what. It is made when a call begins, and not again while it runs."""

import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio
import psutil

from baton.core.tokens import Scope
from baton.files.token_places import LiveTokens
from baton.wire.parties import OPERATING, Party, callers_of, parties_named

ALTERNATIVE_NAMES = "x509_subject_alternative_name"

AuthContext = Mapping[str, Iterable[bytes]]


def parties_in(auth_context: AuthContext, domain: str) -> frozenset[Party]:
    """The parts of the cluster that the other side of a TLS connection has proved to be."""
    names = auth_context.get(ALTERNATIVE_NAMES, ())
    return parties_named((name.decode("ascii", "replace") for name in names), domain)


def is_local(peer: str) -> bool:
    """The caller is on this machine.

    `peer` is gRPC's text, such as ipv4:127.0.0.1:4711, ipv6:%5B::1%5D:4711 or unix:/path. A caller from one
    of this machine's own addresses is on it: the answer never leaves it.
    """
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return kind in ("ipv4", "ipv6") and (address.is_loopback or address in _own_addresses())


def _own_addresses() -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = set[ipaddress.IPv4Address | ipaddress.IPv6Address]()
    for of_interface in psutil.net_if_addrs().values():
        for one in of_interface:
            with contextlib.suppress(ValueError):  # the address is of another family
                found.add(ipaddress.ip_address(one.address.partition("%")[0]))
    return found


class Guard:
    """Decides whether a caller may drain, clear, scale and switch roles."""

    def __init__(self, domain: str, tokens: LiveTokens | None) -> None:
        """An empty `domain` means no mutual TLS, and None for `tokens` that none are configured."""
        self._domain, self._tokens = domain, tokens

    def refusal(self, peer: str, auth_context: AuthContext, token: str) -> str | None:
        """The reason why the caller may not; None: it may."""
        if self._domain and parties_in(auth_context, self._domain) & OPERATING:
            return None
        if self._tokens is not None and self._tokens.holder_of(token, scope=Scope.OPERATE) is not None:
            return None
        if not self._domain and self._tokens is None:
            # There is nothing to prove oneself with, so an account on this very machine is trusted.
            if is_local(peer):
                return None
            return (
                "from another host this wants mutual TLS (tls.ca, tls.cert, tls.key) or an operator's token "
                "(access.tokens): see docs/security.md"
            )
        if token:
            return "this token is not among the operators' (access.tokens), or may only look"
        return "this wants an operator's token: access.token names the file or variable that holds it"


Handler = Callable[[Any, Any], Any]
_ServerInterceptor: Any = grpc.aio.ServerInterceptor
"""The class is generic in the stubs, and not in the library."""


class PartyCheck(_ServerInterceptor):
    """Refuses callers whose certificate is that of another part of the cluster."""

    def __init__(self, domain: str) -> None:
        self._domain = domain

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        return self._checked(handler, callers_of(handler_call_details.method))

    def _checked(self, handler: Any, allowed: frozenset[Party]) -> Any:
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream_to_stream(handler.stream_stream, allowed), **coders
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._unary_to_stream(handler.unary_stream, allowed), **coders
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary_to_unary(handler.unary_unary, allowed), **coders
        )

    def _unary_to_unary(self, call: Handler, allowed: frozenset[Party]) -> Handler:
        async def checked(request: Any, context: Any) -> Any:
            await self._admit(context, allowed)
            return await call(request, context)

        return checked

    def _stream_to_stream(self, call: Handler, allowed: frozenset[Party]) -> Handler:
        """The handler reads and writes its context."""

        async def checked(requests: Any, context: Any) -> Any:
            await self._admit(context, allowed)
            return await call(requests, context)

        return checked

    def _unary_to_stream(self, call: Handler, allowed: frozenset[Party]) -> Handler:
        async def checked(request: Any, context: Any) -> Any:
            await self._admit(context, allowed)
            async for answer in call(request, context):
                yield answer

        return checked

    async def _admit(self, context: Any, allowed: frozenset[Party]) -> None:
        theirs = parties_in(context.auth_context(), self._domain)
        if theirs & allowed:
            return
        have = ", ".join(sorted(theirs)) or f"no part of {self._domain}"
        wanted = " or ".join(sorted(allowed))
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, f"the caller's certificate is of {have}; this is for {wanted}"
        )
