"""TCP connections between workers that carry no gRPC, with this process's identity.

With mutual TLS both ends show a worker's certificate. Without it the connections are plain, and what is sent
over them must carry a secret of its own.
"""

import socket
import ssl

from baton.core.errors import PeerFailure
from baton.wire.parties import Party, name_of
from baton.wire.transport import chosen


def connect(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """Dial another worker. Raises PeerFailure, which names it and the reason."""
    try:
        made = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise PeerFailure(f"no connection to {host}:{port}: {error.strerror or error}") from error
    return _secured(made, f"{host}:{port}", server_side=False)


def accepted(made: socket.socket, *, timeout_s: float) -> socket.socket:
    """Secure a connection that was accepted. It is closed on failure. Raises PeerFailure."""
    made.settimeout(timeout_s)
    return _secured(made, "a caller", server_side=True)


def _secured(made: socket.socket, name: str, *, server_side: bool) -> socket.socket:
    identity, secured = chosen().identity, made
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if identity is None:
            return made
        config, worker = identity.config, name_of(Party.WORKER, identity.domain)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.ca)
        context.load_cert_chain(config.cert, config.key)
        if not server_side:
            return context.wrap_socket(made, server_hostname=worker)  # it checks the server's name
        secured = context.wrap_socket(made, server_side=True)
        shown = secured.getpeercert() or {}
        names = {str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"}
        if worker not in names:
            raise PeerFailure(
                f"{name} shows a certificate of {', '.join(sorted(names))}, which is no worker's"
            )
        return secured
    except OSError as error:  # an SSLError is one
        secured.close()
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise PeerFailure(f"no secure connection to {name}: {reason}") from error
    except PeerFailure:
        secured.close()
        raise
