"""A host's part in a worker whose leader is on another: it runs the followers of one stage.

This module and what it imports never import torch: the followers are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.shape import cores_of_rank
from baton.wire.sessions import begin_session, give_way
from engine.execution.follower_process import how_ended, start_follower

LOOK_S = 0.2
FOLLOWER = "worker.stage_follower"


class StageActor:
    """An async actor. The leader's actor makes it, and Ray ends it with that one, however it ends. The
    followers end with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: what the followers' processes get besides that of Ray on their host."""
        os.environ.update(environment)
        begin_session()
        give_way()  # the followers begin to compute when the leader says so, which is not told here
        self._processes: list[subprocess.Popen[bytes]] = []

    async def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    async def start(self, setups: Sequence[bytes]) -> None:
        """Start a follower for each `StageSetup`, which are JSON. They share the cores of this process."""
        cores = sorted(os.sched_getaffinity(0))
        for number, encoded in enumerate(setups):
            setup: dict[str, Any] = json.loads(encoded)
            setup["follower"]["cores"] = cores_of_rank(cores, number, len(setups))
            # The thread of all methods lives as long as the process: the kernel ends the followers with it.
            self._processes.append(start_follower(json.dumps(setup).encode(), module=FOLLOWER))

    async def ended(self) -> str:
        """Wait until a follower ends, and say how."""
        while True:
            for process in self._processes:
                if how := how_ended(process):
                    return f"process {process.pid} {how}"
            await asyncio.sleep(LOOK_S)

    async def close(self, timeout_s: float) -> None:
        """Wait for the followers' end, and kill those that take longer."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while any(process.poll() is None for process in self._processes):
            if asyncio.get_running_loop().time() >= end_s:
                for process in self._processes:
                    process.kill()
            await asyncio.sleep(LOOK_S / 10)
