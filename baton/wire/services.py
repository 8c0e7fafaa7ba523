"""The calls between Baton's processes, and the messages that exist only for a call.

Everything that the .proto file holds is reached from `SERVICES`: a message is written and mapped because a
call takes it or returns it, or because it is part of one that does. See `baton.wire.generate`.
"""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.core import experts as x
from baton.core import messages as m
from baton.core.budgets import Ask, Grant, Settle
from baton.core.demand import DemandReply, DemandReport
from baton.core.ids import BlockHash, NodeId, RouterId, WorkerId
from baton.core.operate import Action, ClusterState, Decision, Order
from baton.core.recent_requests import RecentRequestsQuery, RecentRequestsReply
from baton.core.sharing import RouterMember, RouterUpdate
from baton.core.store import StoreChanges, StoreMember
from baton.wire.block_locations import LookUpReply
from baton.wire.step_columns import StepColumns, pack, unpack

# --- messages of calls ----------------------------------------------------------------------------


class Empty(msgspec.Struct, frozen=True):
    """Nothing is asked for or answered beyond the call itself."""


class StoreFrame(msgspec.Struct, frozen=True):
    """A store's message as MessagePack, see baton/wire/store_codec.py."""

    payload: bytes


class RoleRequest(msgspec.Struct, frozen=True):
    """A worker shall take another role."""

    role: m.Role
    drain_s: float
    """How long the worker may take to finish or hand over what it has."""


class WorkerStatusReply(msgspec.Struct, frozen=True):
    """A worker's account of itself, for `baton doctor` and tests."""

    worker_id: WorkerId
    role: m.Role
    is_draining: bool
    fingerprint: str
    accounts: dict[str, float]
    """Held blocks, leases and so on by name, see `WorkerCore.status`."""
    notes: tuple[str, ...] = ()
    """What people should know and no number says, such as a transfer backend that does not work here."""


class WorkerLeaves(msgspec.Struct, frozen=True):
    worker_id: WorkerId


class FollowRequest(msgspec.Struct, frozen=True):
    """A router wants to hear what another one has placed."""

    router_id: RouterId
    wire_version: int


class RenewStoreRequest(msgspec.Struct, frozen=True):
    member: StoreMember
    lease_s: float


class StoreKnown(msgspec.Struct, frozen=True):
    """The directory's answer to a store node."""

    is_known: bool
    """False: the directory knows no blocks of the node, which has to send a snapshot."""


class StoreLeaves(msgspec.Struct, frozen=True):
    node_id: NodeId


class StoreMembers(msgspec.Struct, frozen=True):
    members: tuple[StoreMember, ...]


class LookUpRequest(msgspec.Struct, frozen=True):
    hashes: tuple[BlockHash, ...]


# --- unions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message that is one of several."""

    name: str
    union: Any
    doc: str
    opening: type[msgspec.Struct] | None = None
    """The first message of a stream, where it is not in the union: the decoder refuses it."""

    @property
    def openings(self) -> tuple[Any, ...]:
        return () if self.opening is None else (self.opening,)

    @property
    def variants(self) -> tuple[Any, ...]:
        return (*self.openings, *typing.get_args(self.union))


ROUTER_ENVELOPE = Envelope(
    "RouterEnvelope", m.RouterMessage, "What a router says to a worker.", opening=m.RouterHello
)
WORKER_ENVELOPE = Envelope(
    "WorkerEnvelope", m.WorkerMessage | m.SessionEnds, "What a worker says to a router."
)
READER_ENVELOPE = Envelope(
    "ReaderEnvelope", m.ReaderMessage, "What the reader of KV says to its owner.", opening=m.PeerHello
)
OWNER_ENVELOPE = Envelope(
    "OwnerEnvelope", m.OwnerMessage, "What the owner of KV says to its reader.", opening=m.PeerHello
)
ACTION = Envelope("Action", Action, "What an order asks for.")
EXPERT_RANK_REPORT = Envelope(
    "ExpertRankEnvelope", x.ExpertRankReport, "What an expert rank says to the control plane."
)
EXPERT_RANK_ORDER = Envelope(
    "ExpertRankOrderEnvelope", x.ExpertRankOrder, "What the control plane says to an expert rank."
)
EXPERT_CALLER_REPORT = Envelope(
    "ExpertCallerEnvelope", x.ExpertCallerReport, "What a caller of experts says to the control plane."
)
ENVELOPES = (
    ROUTER_ENVELOPE,
    WORKER_ENVELOPE,
    READER_ENVELOPE,
    OWNER_ENVELOPE,
    ACTION,
    EXPERT_RANK_REPORT,
    EXPERT_RANK_ORDER,
    EXPERT_CALLER_REPORT,
)


@dataclass(frozen=True, slots=True)
class Via:
    """A struct that travels in place of another."""

    struct: type[msgspec.Struct]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


TRAVELS_AS: dict[Any, Via] = {m.StepOutput: Via(StepColumns, pack, unpack)}

# --- services -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """Any number of messages, one after the other."""

    message: type[msgspec.Struct] | Envelope


@dataclass(frozen=True, slots=True)
class Rpc:
    name: str
    request: type[msgspec.Struct] | Envelope | Stream
    reply: type[msgspec.Struct] | Envelope | Stream
    doc: str = ""


@dataclass(frozen=True, slots=True)
class RpcService:
    name: str
    doc: str
    calls: tuple[Rpc, ...]


SERVICES = (
    RpcService(
        "Worker",
        "Router and worker.",
        (
            Rpc(
                "Session",
                Stream(ROUTER_ENVELOPE),
                Stream(WORKER_ENVELOPE),
                "One stream per router and worker carries every sequence of that router. The stream's end is "
                "the loss of the other side.",
            ),
            Rpc(
                "Drain", Empty, Empty, "The worker takes nothing new and finishes or hands over what it has."
            ),
            Rpc(
                "SetRole",
                RoleRequest,
                Empty,
                "The worker takes nothing new, finishes or hands over what it has within drain_s, takes the "
                "role and serves again. It answers at once; a later request replaces this one.",
            ),
            Rpc("GetStatus", Empty, WorkerStatusReply),
        ),
    ),
    RpcService(
        "Peer",
        "Decode worker and prefill worker.",
        (
            Rpc(
                "Session",
                Stream(READER_ENVELOPE),
                Stream(OWNER_ENVELOPE),
                "The decode worker opens it. Both sides say PeerHello first; a fingerprint or wire version "
                "that differs ends the call with FAILED_PRECONDITION.",
            ),
        ),
    ),
    RpcService(
        "StoreNode",
        "Two store nodes, and a store node and its operator.",
        (
            Rpc(
                "Session",
                Stream(StoreFrame),
                Stream(StoreFrame),
                "Frames hold a NodeToNode of baton/core/store.py. The node that wants to read opens the "
                "session. Both sides say NodeHello first; what they do not agree on ends the call with "
                "FAILED_PRECONDITION.",
            ),
            Rpc(
                "Ask",
                StoreFrame,
                StoreFrame,
                "The request is a StoreRequest of baton/core/store_admin.py, and the reply a StoreReply.",
            ),
        ),
    ),
    RpcService(
        "Directory",
        "Membership of workers and routers.",
        (
            Rpc("Renew", m.Member, Empty, "Registers the member and renews its lease."),
            Rpc("Leave", WorkerLeaves, Empty),
            Rpc(
                "Watch",
                RouterMember,
                Stream(m.MembershipView),
                "The whole view at once, again after every change, and at least once a second. A router that "
                "names an address is listed while it watches.",
            ),
        ),
    ),
    RpcService(
        "Router",
        "Routers among themselves.",
        (
            Rpc(
                "Follow",
                FollowRequest,
                Stream(RouterUpdate),
                "All that counts at once, then what changed, and at least twice a second.",
            ),
            Rpc(
                "RecentRequests",
                RecentRequestsQuery,
                RecentRequestsReply,
                "What became of single requests, for operators.",
            ),
        ),
    ),
    RpcService(
        "StoreDirectory",
        "Which store node holds which block.",
        (
            Rpc("Renew", RenewStoreRequest, StoreKnown),
            Rpc("Leave", StoreLeaves, Empty),
            Rpc("GetMembers", Empty, StoreMembers),
            Rpc("Publish", StoreChanges, StoreKnown),
            Rpc("LookUp", LookUpRequest, LookUpReply),
        ),
    ),
    RpcService(
        "Budgets",
        "What tenants may spend, counted for all routers.",
        (Rpc("Take", Ask, Grant), Rpc("Settle", Settle, Empty)),
    ),
    RpcService(
        "Demand",
        "What routers count and see, for the autoscaler.",
        (Rpc("Report", DemandReport, DemandReply),),
    ),
    RpcService(
        "Experts",
        "Expert ranks and their callers to the control plane.",
        (
            Rpc(
                "FollowRank",
                Stream(EXPERT_RANK_REPORT),
                Stream(EXPERT_RANK_ORDER),
                "The rank says ExpertRankHello first. The end of the stream is its loss.",
            ),
            Rpc(
                "FollowCaller",
                Stream(EXPERT_CALLER_REPORT),
                Stream(x.ExpertMapUpdate),
                "The caller says ExpertCallerHello first. The answer is the present map, and later ones.",
            ),
        ),
    ),
    RpcService(
        "Operate",
        "Operators, autoscaler and dashboard to the control plane.",
        (
            Rpc("Act", Order, Decision),
            Rpc(
                "Watch",
                Empty,
                Stream(ClusterState),
                "The state at once, again after every change, and at least once a second.",
            ),
        ),
    ),
)
