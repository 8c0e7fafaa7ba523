"""Routers' reports on their requests, over a real connection."""

import asyncio

import grpc
import pytest

from baton.core.costs import StepCosts
from baton.core.demand import Bin, ClassLoad, DemandReply, DemandReport, Traits, WorkerLoad
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Role
from baton.wire.demand import DemandClient
from baton.wire.link import LinkBroken
from baton.wire.proto import baton_pb2 as pb
from baton.wire.server import start_server
from router.live.demand_reporter import DemandReporter

TRAITS = Traits(StepCosts(0.01, 1e-4, 1e-3, 1e-7, 1e-9), 512, 64, 100_000)
WORKER = WorkerLoad(WorkerId("d.x1"), Role.DECODE, 0.5, 100, 3, 900, 0.25, TRAITS)
REPORT = DemandReport(RouterId("r"), 12.5, {"chat": ClassLoad({7: Bin(2, 30)}, 1, 15)}, 1, 15, (WORKER,))


class Control:
    def __init__(self):
        self.heard = []
        self.enough = asyncio.Event()

    def report(self, report):
        self.heard.append(report)
        if len(self.heard) >= 2:
            self.enough.set()
        return DemandReply(0.01)


@pytest.fixture
async def control():
    handler = Control()
    server, port = await start_server("127.0.0.1", 0, demand=handler)
    handler.address = f"127.0.0.1:{port}"
    yield handler
    await server.stop(0)


async def test_a_report_arrives_as_it_was_sent_and_is_answered(control):
    client = DemandClient(control.address)
    assert await client.report(REPORT) == DemandReply(0.01)
    assert control.heard == [REPORT]
    await client.close()


async def test_what_is_no_report_is_refused(control):
    client = DemandClient(control.address)
    with pytest.raises(grpc.RpcError) as caught:
        await client._standing.stub.Report(pb.DemandReport(workers=[pb.WorkerLoad(role=9)]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await client.close()


async def test_a_control_plane_that_is_away_is_a_broken_link():
    client = DemandClient("127.0.0.1:1")
    with pytest.raises(LinkBroken):
        await client.report(REPORT)
    await client.close()


class Driver:
    def demand(self, router_id):
        return REPORT


async def test_a_router_reports_again_and_again(control):
    client = DemandClient(control.address)
    task = asyncio.create_task(DemandReporter(Driver(), client, RouterId("r")).run())
    async with asyncio.timeout(10):
        await control.enough.wait()
    task.cancel()
    await client.close()
    assert control.heard[:2] == [REPORT, REPORT]
