"""Addresses to listen on, and the addresses under which others reach them."""

import ipaddress
import socket

from baton.core.errors import SetupError

_SOMEWHERE_ELSE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses in networks reserved for documentation: only the route is looked up, nothing is sent."""


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT, where an IPv6 address is in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Only this machine can reach what listens there. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_host(host: str, *, towards: str = "") -> str:
    """The host under which others reach a server that listens on `host`.

    It is `host` itself, unless that means all interfaces ("0.0.0.0", "::"): then it is the address of the
    interface that leads to `towards`, the host:port of a peer; empty: to other networks. Raises SetupError if
    there is none.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host  # it is a name
    if not address.is_unspecified:
        return host
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    far = split_address(towards) if towards else (_SOMEWHERE_ELSE[family], 9)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(far)  # a datagram socket only chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(
            f"listening on all interfaces ({host}), but none of them leads to {far[0]} "
            f"({error.strerror or error}): name the address that other hosts should use"
        ) from error
