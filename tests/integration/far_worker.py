"""A worker whose later stages are in processes that share nothing but the network with the leader.

They stand for other hosts, without Ray. `python -m tests.integration.far_worker ROLE OWN_STAGES SETTING…`
prints `ready ADDRESS PID…`, with the pids of the followers that are elsewhere.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence

import msgspec

from baton.config import Config
from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from baton.core.shape import Shape
from baton.telemetry.logs import configure_logs
from baton.wire.transport import secure
from commands.settings import overlay
from engine.execution.follower_process import start_follower
from engine.execution.spread import FollowerSetup, Reach, Spread
from worker.part_thread import StageSetup
from worker.process import WorkerProcess
from worker.remote_parts import RemoteParts
from worker.stage_actor import FOLLOWER
from worker.stage_hosts import PlacedStages

HOST = "127.0.0.1"


class ProcessHost:
    """A `StageHost` on this machine."""

    def __init__(self, setup: Callable[[FollowerSetup], StageSetup]) -> None:
        self._setup = setup
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, setups: Sequence[FollowerSetup]) -> None:
        for setup in setups:
            encoded = msgspec.json.encode(self._setup(setup))
            self.processes.append(start_follower(encoded, module=FOLLOWER))

    def ended(self) -> str:
        return next((f"process {p.pid} ended" for p in self.processes if p.poll() is not None), "")

    def close(self, timeout_s: float) -> None:
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            process.kill()
            process.wait()


async def serve(role: Role, own_stages: int, config: Config) -> int:
    shape, reach = Shape.parse(config.engine.shape), Reach(HOST, HOST)
    worker_id = WorkerId(f"{role}.{secrets.token_hex(4)}")
    configure_logs(worker_id, config.telemetry)
    secure(config.tls, config.access)
    far = range(own_stages, shape.pipeline)
    hosts, stages = list[ProcessHost](), None
    if far:
        parts = RemoteParts.create(worker_id, shape.pool_ranks(far), reach, config.transfer)
        hosts = [ProcessHost(parts.setup) for _ in far]
        stages = PlacedStages(Spread(reach, (*[None] * own_stages, *hosts)), parts)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def on_ready(member: Member) -> None:
        pids = [process.pid for host in hosts for process in host.processes]
        print("ready", member.address, *pids, flush=True)

    process = WorkerProcess(worker_id, role, config, stages=stages)
    await process.run(stop=stop, stop_now=asyncio.Event(), on_ready=on_ready)
    return 0


def main() -> None:
    role, own_stages, *sets = sys.argv[1:]
    try:
        status = asyncio.run(serve(Role(role), int(own_stages), overlay(Config(), sets)))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as a worker ends: see `commands.serve`


if __name__ == "__main__":
    main()
