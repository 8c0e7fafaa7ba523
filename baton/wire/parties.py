"""Which part of a cluster may call what. Pure.

With mutual TLS a certificate's DNS names say which parts its holder is: `worker.baton.internal`. The caller
demands the name of the part that it wants to speak to, and the server looks its caller's names up here.
"""

from collections.abc import Iterable
from enum import StrEnum, auto

PACKAGE = "/baton.v1."


class Party(StrEnum):
    CONTROL = auto()
    ROUTER = auto()
    WORKER = auto()
    STORE = auto()
    OPERATOR = auto()
    """A person, or what a person runs: `baton store`, `baton doctor`."""


OPERATING = frozenset({Party.CONTROL, Party.OPERATOR})
"""May drain, clear, flip and scale."""

_EVERYBODY = frozenset(Party)
_ROUTERS = frozenset({Party.ROUTER})
_WORKERS = frozenset({Party.WORKER})
_STORES = frozenset({Party.STORE})

CALLERS: dict[str, frozenset[Party]] = {
    "Worker/Session": _ROUTERS,
    "Worker/Drain": OPERATING,
    "Worker/SetRole": OPERATING,
    "Worker/GetStatus": _EVERYBODY,
    "Peer/Session": _WORKERS,
    "StoreNode/Session": _STORES,
    "StoreNode/Ask": OPERATING,
    "Directory/Renew": _WORKERS,
    "Directory/Leave": _WORKERS,
    "Directory/Watch": _ROUTERS,
    "Router/Follow": _ROUTERS,
    "StoreDirectory/Renew": _STORES,
    "StoreDirectory/Leave": _STORES,
    "StoreDirectory/Publish": _STORES,
    "StoreDirectory/GetMembers": _STORES | _ROUTERS | OPERATING,
    "StoreDirectory/LookUp": _STORES | _ROUTERS | OPERATING,
    "Budgets/Take": _ROUTERS,
    "Budgets/Settle": _ROUTERS,
    "Demand/Report": _ROUTERS,
}
"""By Service/Method. What is not listed is for OPERATING."""

_SERVERS = {"Worker": Party.WORKER, "Peer": Party.WORKER, "StoreNode": Party.STORE, "Router": Party.ROUTER}


def server_of(service: str) -> Party:
    """Who serves it, by the service's name in the .proto file."""
    return _SERVERS.get(service, Party.CONTROL)


def callers_of(method: str) -> frozenset[Party]:
    """`method` as gRPC has it: /baton.v1.Service/Method."""
    return CALLERS.get(method.removeprefix(PACKAGE), OPERATING)


def name_of(party: Party, domain: str) -> str:
    return f"{party}.{domain}"


def parties_named(names: Iterable[str], domain: str) -> frozenset[Party]:
    """What the holder of a certificate with these DNS names is."""
    ours = {name_of(party, domain): party for party in Party}
    return frozenset(ours[name.lower()] for name in names if name.lower() in ours)
