"""How this process listens and dials.

One process has one identity: it is chosen once, when the process begins, and every server and channel has it.
Nobody can forget it: without a choice there is neither.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio

from baton.config import AccessConfig, TlsConfig
from baton.core.errors import SetupError
from baton.core.tokens import bearer_in
from baton.files.token_places import LiveTokens, token_at
from baton.wire.address import host_port
from baton.wire.guard import Guard, PartyCheck
from baton.wire.identity import Identity
from baton.wire.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.parties import OPERATING, Party, callers_of, name_of

OLD_CALLS_S = 10.0
"""The time that calls under way have on a channel that was replaced."""


@dataclass(frozen=True, slots=True)
class Security:
    """The choice that `secure` was given."""

    identity: Identity | None
    """This process's certificate; None: nothing is encrypted, and nobody is asked for a certificate."""
    tokens: LiveTokens | None
    token_place: str
    """The file or variable with the token to show; empty: none."""

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """The metadata of a call of `method`, which is /baton.v1.Service/Method. Raises SetupError.

        The token goes with calls that drain, clear, scale or switch roles, and with no others.
        """
        if not self.token_place or callers_of(method) != OPERATING:
            return ()
        return (("authorization", f"Bearer {token_at(self.token_place)}"),)


_chosen: Security | None = None


def secure(tls: TlsConfig, access: AccessConfig | None = None) -> Security:
    """Choose this process's identity. Only tests call it more than once. Raises SetupError."""
    global _chosen
    access = access or AccessConfig()
    _chosen = Security(
        identity=Identity(tls) if tls.is_on else None,
        tokens=LiveTokens(access.tokens) if access.tokens else None,
        token_place=access.token,
    )
    return _chosen


def chosen() -> Security:
    if _chosen is None:
        raise RuntimeError("call baton.wire.transport.secure before listening or dialling")
    return _chosen


def channel_to(address: str, party: Party) -> grpc.aio.Channel:
    """A channel to a `party` of this cluster, which must prove it if this process has mutual TLS."""
    identity = chosen().identity
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    # Hosts come and go, and have addresses that no certificate knows beforehand. The part of the cluster that
    # answers is what counts.
    name = ("grpc.ssl_target_name_override", name_of(party, identity.domain))
    credentials = identity.current().for_channel()
    return grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, name])


def blocking_channel_to(address: str, party: Party) -> grpc.Channel:
    """The same for a thread that has no event loop."""
    identity = chosen().identity
    if identity is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = ("grpc.ssl_target_name_override", name_of(party, identity.domain))
    credentials = identity.current().for_channel()
    return grpc.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, name])


class Standing:
    """A stub on a channel that lasts.

    It is replaced when this process has new certificates, since a channel goes on dialling with those that it
    was made with.
    """

    def __init__(self, address: str, party: Party, make_stub: Callable[[Any], Any]) -> None:
        self._address, self._party, self._make_stub = address, party, make_stub
        self._ending: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        identity = chosen().identity
        self._credentials = identity.current() if identity is not None else None
        self._channel = channel_to(self._address, self._party)
        self._stub = self._make_stub(self._channel)

    @property
    def stub(self) -> Any:
        identity = chosen().identity
        if identity is not None and identity.current() is not self._credentials:
            ending = asyncio.create_task(_closed(self._channel, OLD_CALLS_S))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._open()
        return self._stub

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await _closed(self._channel, None)


async def _closed(channel: grpc.aio.Channel, grace_s: float | None) -> None:
    with contextlib.suppress(grpc.RpcError):
        await channel.close(grace_s)


def new_server() -> grpc.aio.Server:
    security = chosen()
    domain = security.identity.domain if security.identity is not None else ""
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=[PartyCheck(domain)] if domain else [])


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listen on `port` and return the bound port. Raises SetupError if it is taken."""
    identity = chosen().identity
    try:
        if identity is None:
            return server.add_insecure_port(host_port(host, port))
        return server.add_secure_port(host_port(host, port), identity.server_credentials())
    except RuntimeError:
        raise SetupError(f"cannot listen on {host}:{port}: the port is in use or not ours") from None


async def require_operator(context: Any) -> None:
    """End the call unless the caller has proved to be an operator or the control plane.

    A servicer awaits it before it does what only those may do.
    """
    security = chosen()
    guard = Guard(security.identity.domain if security.identity is not None else "", security.tokens)
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    if reason := guard.refusal(context.peer(), context.auth_context(), bearer_in(metadata)):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)


_HINTS = {
    "unable to get local issuer certificate": "its certificate is not of our authority (tls.ca)",
    "self signed certificate": "its certificate is not of our authority (tls.ca)",
    "certificate signature failure": "its certificate is not of our authority (tls.ca)",
    "certificate has expired": "its certificate has expired",
    "certificate is not yet valid": "its certificate is not valid yet: are the clocks right?",
    "Hostname Verification Check failed": "its certificate is of another part, or of another tls.domain",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}


def explained(details: str) -> str:
    """The reason why no connection was made, from gRPC's own text, in words that say what to look at."""
    for sign, meaning in _HINTS.items():
        if sign in details:
            return f"TLS: {meaning}"
    identity = chosen().identity
    if not details.endswith(("Socket closed", "Connection reset by peer")):
        return details
    if identity is None:
        return f"{details}: it hung up at once; does it want TLS? (tls.ca, tls.cert, tls.key)"
    ends = identity.current().ends
    if datetime.now(UTC) >= ends:
        return f"TLS: our certificate {identity.config.cert} expired on {ends:%Y-%m-%d %H:%M} UTC"
    return f"{details}: it hung up at once; is our certificate of its authority? (tls.ca)"
