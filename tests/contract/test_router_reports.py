"""A router and a control plane that scales, over gRPC, without workers: what waits at one wakes the other."""

import asyncio

import httpx
import pytest

from baton.config import Config
from baton.core.messages import Role
from baton.core.operate import Pool
from baton.wire.server import start_server
from control_plane.plane import ControlPlane
from control_plane.scaling import AutoscalerRunner, live_settings
from router.process import run_router
from tests.models import make_model
from tests.unit.control_plane.test_plane import Replicas


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=3)


async def test_a_request_that_waits_where_there_is_no_worker_brings_workers_back(model):
    config = Config.model_validate(
        {
            "model": {"path": str(model)},
            "cluster": {"prefill_workers": 1, "decode_workers": 1},
            "router": {"host": "127.0.0.1", "port": 0},
            # Intervals are as long as they may be: what waits must not wait for one.
            "autoscale": {
                "mode": "on",
                "interval_s": 300,
                "prefill_min": 0,
                "decode_min": 0,
                "zero_after_s": 60,
                "start_s": 5,
            },
        }
    )
    replicas = Replicas()
    plane = ControlPlane(config.cluster, life="x", replicas=replicas, spawn=asyncio.create_task)
    plane.want([Pool("tiny", {})])
    scaling = AutoscalerRunner(live_settings(config), plane)
    server, port = await start_server("127.0.0.1", 0, directory=plane, demand=scaling)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    router = run_router(config, control_address=f"127.0.0.1:{port}", on_ready=ready.set_result, stop=stop)
    async with asyncio.timeout(60):
        tasks = [asyncio.create_task(scaling.run()), asyncio.create_task(router)]
        async with httpx.AsyncClient(base_url=(await ready)[0]) as client:
            while (await client.get("/health")).json()["directory"] != "current":
                pass
            health = (await client.get("/health/ready")).raise_for_status().json()
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            async for state in plane.changes():
                if state.decisions:
                    break
            asked.cancel()
        stop.set()
        await tasks[1]
    tasks[0].cancel()
    plane.close()
    await server.stop(0)
    assert health["status"] == "asleep", "requests must still be sent here"
    assert {role for _, role in replicas.started} == {Role.PREFILL, Role.DECODE}
    (decision,) = state.decisions
    assert decision.who == "autoscaler"
    assert "back from zero" in decision.reason
