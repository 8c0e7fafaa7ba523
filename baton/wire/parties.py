"""The table of which part of a cluster may call what. This module is pure.

A certificate's DNS names say which parts its holder is under mutual TLS: `worker.baton.internal`. The caller
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
"""Parts that may drain, clear, scale and switch roles."""

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
    "Experts/FollowRank": _WORKERS,
    "Experts/FollowCaller": _WORKERS,
}
"""The callers of each method, by Service/Method. A method that is not listed is for OPERATING."""

_SERVERS = {"Worker": Party.WORKER, "Peer": Party.WORKER, "StoreNode": Party.STORE, "Router": Party.ROUTER}


def server_of(service: str) -> Party:
    """The part that serves a service, by the service's name in the .proto file."""
    return _SERVERS.get(service, Party.CONTROL)


def callers_of(method: str) -> frozenset[Party]:
    """The parts that may call `method`, which is gRPC's text: /baton.v1.Service/Method."""
    return CALLERS.get(method.removeprefix(PACKAGE), OPERATING)


def name_of(party: Party, domain: str) -> str:
    return f"{party}.{domain}"


def parties_named(names: Iterable[str], domain: str) -> frozenset[Party]:
    """The parts that the holder of a certificate with these DNS names is."""
    ours = {name_of(party, domain): party for party in Party}
    return frozenset(ours[name.lower()] for name in names if name.lower() in ours)
