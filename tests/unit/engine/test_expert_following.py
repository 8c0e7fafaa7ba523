"""A worker's connection to its group: maps come over gRPC, reports go, and a lost control plane changes
nothing."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.config.experts import ExpertsConfig
from baton.core.errors import SetupError
from baton.core.experts import (
    ExpertCallerHello,
    ExpertCountsReport,
    ExpertEpochUsed,
    ExpertRankSuspected,
    group_name,
)
from baton.core.ids import WorkerId
from baton.wire.link import LinkBroken
from baton.wire.server import start_server
from engine.experts.access import ExpertAccess
from engine.experts.connecting import connection_to
from engine.model_files.division import Division
from engine.model_files.read_spec import load_spec
from tests.expert_ranks import local_experts
from tests.models import make_model

GROUP = group_name("m", "decode")


class Control:
    """Sends the maps that it is given to every caller, and notes what callers say."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.changed = asyncio.Condition()
        self.links: list[object] = []
        self.map = None

    async def serve_rank(self, hello, link) -> None:
        raise NotImplementedError

    async def serve_caller(self, hello, link) -> None:
        self.links.append(link)
        await self._note(hello)
        if self.map is not None:
            link.send(self.map)
        with contextlib.suppress(LinkBroken):
            async for report in link:
                await self._note(report)

    async def _note(self, report: object) -> None:
        async with self.changed:
            self.said.append(report)
            self.changed.notify_all()

    async def until(self, kind: type, count: int = 1) -> list[object]:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: len(self._of(kind)) >= count)
            return self._of(kind)

    def _of(self, kind: type) -> list[object]:
        return [one for one in self.said if isinstance(one, kind)]


def access(port: int, **changes: object) -> ExpertAccess:
    found = ExpertAccess(
        f"127.0.0.1:{port}", GROUP, WorkerId("decode-0.a"), "decode-0.a/0", ExpertsConfig(), 20.0
    )
    assert ExpertAccess.from_json(found.to_json()) == found
    return ExpertAccess(**{**{name: getattr(found, name) for name in found.__slots__}, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "mixtral", with_tokenizer=False)


async def test_maps_come_and_reports_go(folder: Path) -> None:
    control = Control()
    server, port = await start_server("127.0.0.1", 0, experts=control)
    with local_experts(folder) as experts:
        control.map = experts.update()
        where = access(port)

        def connected() -> tuple[object, object]:
            with connection_to(where) as connection:
                assert connection is not None
                division = Division(load_spec(folder))
                return connection, connection.routed(division, torch.float32)

        connection, routed = await asyncio.to_thread(connected)
        assert control.said[0] == ExpertCallerHello("decode-0.a/0", WorkerId("decode-0.a"), GROUP, 0)
        assert (await control.until(ExpertEpochUsed))[0] == ExpertEpochUsed(experts.epoch)
        counts = np.arange(8, dtype=np.int64).reshape(2, 4)
        connection.report_counts(counts)
        connection.report_counts(counts + 1)
        assert await control.until(ExpertCountsReport, 2) == [
            ExpertCountsReport(2, 4, tuple(range(8))),
            ExpertCountsReport(2, 4, (1,) * 8),
        ]
        experts.announce({"a": experts.everything()})
        control.map = experts.update()
        control.links[0].send(control.map)
        assert (await control.until(ExpertEpochUsed, 2))[1] == ExpertEpochUsed(experts.epoch)
        x, chosen = torch.randn((3, 64)), torch.tensor([[0, 1], [2, 3], [1, 2]])

        def computed() -> torch.Tensor:
            return routed.finish(routed.begin(0, x, chosen), torch.ones((3, 2)))

        before = await asyncio.to_thread(computed)
        await server.stop(0)  # the control plane is gone: the map goes on to be used
        assert torch.equal(await asyncio.to_thread(computed), before)
        server, _ = await start_server("127.0.0.1", port, experts=control)
        hellos = await control.until(ExpertCallerHello, 2)
        assert hellos[1].epoch == experts.epoch
        experts.ranks["b"].close()
        experts.ranks["a"].close()
        suspected = await control.until(ExpertRankSuspected)
        assert suspected[0].is_gone
        assert suspected[0].rank_id == "a"
        await asyncio.to_thread(connection.close)
    await server.stop(0)


async def test_a_worker_whose_experts_never_come_says_so(folder: Path) -> None:
    control = Control()
    server, port = await start_server("127.0.0.1", 0, experts=control)

    with pytest.raises(SetupError, match="not all on ranks that can be reached"):
        await asyncio.to_thread(routed_of, folder, access(port, start_timeout_s=0.2))
    await server.stop(0)


def routed_of(folder: Path, where: ExpertAccess | None = None) -> None:
    with connection_to(where or access(1)) as connection:
        assert connection is not None
        connection.routed(Division(load_spec(folder)), torch.float32)


def test_a_dense_model_has_no_expert_ranks(tmp_path: Path) -> None:
    made = make_model(tmp_path, "llama", with_tokenizer=False)
    with pytest.raises(SetupError, match="no routed experts"):
        routed_of(made)
