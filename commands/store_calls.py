"""Sends an operator's requests to a store node."""

import asyncio
from collections.abc import Sequence

from baton.core.errors import SetupError
from baton.core.store import Tier
from baton.core.store_admin import AskStatus, Declined, Done, NodeStatus, StoreReply, StoreRequest
from baton.wire.link import LinkBroken
from baton.wire.local import ask_store
from baton.wire.store_nodes import ask_node
from baton.wire.transport import secure
from commands.settings import load_config


def status(socket: str | None, node: str, sets: Sequence[str]) -> NodeStatus:
    """Raises SetupError."""
    reply = _ask(socket, node, sets, AskStatus())
    if not isinstance(reply, NodeStatus):
        raise SetupError(f"the store node sent an unexpected answer: {reply}")
    return reply


def send(socket: str | None, node: str, sets: Sequence[str], request: StoreRequest) -> str:
    """Send the request and return the node's answer, which is one line. Raises SetupError if it declines."""
    match _ask(socket, node, sets, request):
        case Done(text):
            return text
        case Declined(text):
            raise SetupError(f"the store node declines: {text}")
        case other:
            raise SetupError(f"the store node sent an unexpected answer: {other}")


def tier_named(name: str | None) -> Tier | None:
    if name in (None, Tier.HOST, Tier.SSD):
        return None if name is None else Tier(name)
    raise SetupError(f"--tier {name} is not a tier: choose host or ssd")


def _ask(socket: str | None, node: str, sets: Sequence[str], request: StoreRequest) -> StoreReply:
    if socket and node:
        raise SetupError("name the store node with --socket or with --node, not with both")
    config = load_config(sets, {"store.socket": socket})
    path = "" if node else config.store.socket
    if not node and not path:
        raise SetupError(
            "no store node is named: give its socket with --socket (`baton serve` logs it), "
            "or its address with --node"
        )
    secure(config.tls, config.access)
    try:
        return asyncio.run(ask_node(node, request) if node else ask_store(path, request))
    except LinkBroken as error:
        raise SetupError(f"cannot reach the store node: {error}") from None
