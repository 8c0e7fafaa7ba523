"""The answering side of every service: servicers that turn protobuf into handler calls."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.core import messages as m
from baton.core.budgets import Ledger
from baton.core.ids import RouterId, WorkerId
from baton.core.sharing import RouterMember
from baton.wire.budgets import BudgetsServicer
from baton.wire.client import disagreement
from baton.wire.demand import DemandHandler, DemandServicer
from baton.wire.experts import ExpertsHandler, ExpertsServicer
from baton.wire.link import END, Link
from baton.wire.operate import OperateHandler, OperateServicer
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.proto import mapping
from baton.wire.routers import RouterHandler, add_router
from baton.wire.services import WorkerStatusReply
from baton.wire.serving import first_message, until_end
from baton.wire.store_directory import StoreDirectoryHandler, StoreDirectoryServicer
from baton.wire.store_nodes import StoreHandler, add_store_node
from baton.wire.transport import listen, new_server, require_operator

WorkerEnd = Link[m.WorkerMessage | m.SessionEnds, m.RouterMessage]
OwnerEnd = Link[m.OwnerMessage, m.ReaderMessage]


class WorkerHandler(Protocol):
    async def serve_router(self, router_id: RouterId, link: WorkerEnd) -> None:
        """Runs until the router's stream ends; the first message sent must be WorkerHello.

        LinkBroken may escape. A loss of the connection cancels it.
        """
        ...

    async def drain(self) -> None: ...

    async def set_role(self, role: m.Role, drain_s: float) -> None: ...

    def status(self) -> WorkerStatusReply: ...


class PeerHandler(Protocol):
    def hello(self) -> m.PeerHello: ...

    async def serve_reader(self, theirs: m.PeerHello, link: OwnerEnd) -> None:
        """Runs until the reader's stream ends. LinkBroken may escape. A loss of the connection cancels it."""
        ...


class DirectoryHandler(Protocol):
    def renew(self, member: m.Member) -> None: ...

    def leave(self, worker_id: WorkerId) -> None: ...

    def watch(self, member: RouterMember) -> AsyncIterator[m.MembershipView]:
        """Views of the membership. A router that has an address is listed until this is closed."""
        ...


class _WorkerServicer(pb_grpc.WorkerServicer):
    def __init__(self, handler: WorkerHandler) -> None:
        self._handler = handler

    async def Session(self, request_iterator: Any, context: Any) -> None:
        first = await first_message(context)
        if first is END or first.WhichOneof("message") != "router_hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "say hello first")
        hello = mapping.router_hello_from_pb(first.router_hello)
        if hello.wire_version != m.WIRE_VERSION:
            theirs = f"wire version {hello.wire_version}, ours is {m.WIRE_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, theirs)
        link: WorkerEnd = Link(
            peer=hello.router_id,
            read=context.read,
            write=context.write,
            encode=mapping.worker_envelope_to_pb,
            decode=mapping.router_envelope_from_pb,
        )
        await until_end(self._handler.serve_router(hello.router_id, link), link)

    async def Drain(self, request: Any, context: Any) -> pb.Empty:
        await require_operator(context)
        await self._handler.drain()
        return pb.Empty()

    async def SetRole(self, request: Any, context: Any) -> pb.Empty:
        await require_operator(context)
        wanted = mapping.role_request_from_pb(request)
        await self._handler.set_role(wanted.role, wanted.drain_s)
        return pb.Empty()

    async def GetStatus(self, request: Any, context: Any) -> pb.WorkerStatusReply:
        return mapping.worker_status_reply_to_pb(self._handler.status())


class _PeerServicer(pb_grpc.PeerServicer):
    def __init__(self, handler: PeerHandler) -> None:
        self._handler = handler

    async def Session(self, request_iterator: Any, context: Any) -> None:
        first = await first_message(context)
        if first is END or first.WhichOneof("message") != "peer_hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "say hello first")
        ours, theirs = self._handler.hello(), mapping.peer_hello_from_pb(first.peer_hello)
        if mismatch := disagreement(ours, theirs):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        await context.write(mapping.owner_envelope_to_pb(ours))
        link: OwnerEnd = Link(
            peer=theirs.worker_id,
            read=context.read,
            write=context.write,
            encode=mapping.owner_envelope_to_pb,
            decode=mapping.reader_envelope_from_pb,
        )
        await until_end(self._handler.serve_reader(theirs, link), link)


class _DirectoryServicer(pb_grpc.DirectoryServicer):
    def __init__(self, handler: DirectoryHandler) -> None:
        self._handler = handler

    async def Renew(self, request: Any, context: Any) -> pb.Empty:
        self._handler.renew(mapping.member_from_pb(request))
        return pb.Empty()

    async def Leave(self, request: Any, context: Any) -> pb.Empty:
        self._handler.leave(mapping.worker_leaves_from_pb(request).worker_id)
        return pb.Empty()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.MembershipView]:
        async for view in self._handler.watch(mapping.router_member_from_pb(request)):
            yield mapping.membership_view_to_pb(view)


async def start_server(
    host: str,
    port: int,
    *,
    worker: WorkerHandler | None = None,
    peer: PeerHandler | None = None,
    directory: DirectoryHandler | None = None,
    store_directory: StoreDirectoryHandler | None = None,
    store: StoreHandler | None = None,
    budgets: Ledger | None = None,
    router: RouterHandler | None = None,
    operate: OperateHandler | None = None,
    demand: DemandHandler | None = None,
    experts: ExpertsHandler | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Serve the given handlers and return the server and the bound port.

    `await server.stop(grace)` stops it. Raises SetupError if the port is taken.
    """
    server = new_server()
    if worker is not None:
        pb_grpc.add_WorkerServicer_to_server(_WorkerServicer(worker), server)
    if peer is not None:
        pb_grpc.add_PeerServicer_to_server(_PeerServicer(peer), server)
    if directory is not None:
        pb_grpc.add_DirectoryServicer_to_server(_DirectoryServicer(directory), server)
    if store_directory is not None:
        servicer = StoreDirectoryServicer(store_directory)
        pb_grpc.add_StoreDirectoryServicer_to_server(servicer, server)
    if budgets is not None:
        pb_grpc.add_BudgetsServicer_to_server(BudgetsServicer(budgets), server)
    if demand is not None:
        pb_grpc.add_DemandServicer_to_server(DemandServicer(demand), server)
    if operate is not None:
        pb_grpc.add_OperateServicer_to_server(OperateServicer(operate), server)
    if experts is not None:
        pb_grpc.add_ExpertsServicer_to_server(ExpertsServicer(experts), server)
    if store is not None:
        add_store_node(store, server)
    if router is not None:
        add_router(router, server)
    bound = listen(server, host, port)
    await server.start()
    return server, bound


__all__: Sequence[str] = (
    "DirectoryHandler",
    "OwnerEnd",
    "PeerHandler",
    "WorkerEnd",
    "WorkerHandler",
    "start_server",
)
