"""A host's part in a worker whose leader is on another: it runs the followers of one stage.

This module and what it imports never import torch: the followers are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from baton.core.shape import cores_of_rank

LOOK_S = 0.2


class StageActor:
    """An async actor. The leader's actor makes it, and Ray ends it with that one, however it ends. The
    followers end with this process."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    async def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    async def start(self, setups: Sequence[bytes]) -> None:
        """Start a follower for each `FollowerSetup`, which are JSON. They share the cores of this process."""
        cores = sorted(os.sched_getaffinity(0))
        for number, encoded in enumerate(setups):
            setup: dict[str, Any] = json.loads(encoded)
            setup["cores"] = cores_of_rank(cores, number, len(setups))
            self._spawn(json.dumps(setup).encode())

    def _spawn(self, setup: bytes) -> None:
        """It runs in the thread of all methods, which lives as long as the process: the kernel ends the
        followers with it."""
        command = [sys.executable, "-m", "engine.execution.follower", str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(setup)

    async def ended(self) -> str:
        """Wait until a follower ends, and say how."""
        while True:
            for process in self._processes:
                if (code := process.poll()) is not None:
                    how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
                    return f"process {process.pid} ended {how}"
            await asyncio.sleep(LOOK_S)

    async def close(self, timeout_s: float) -> None:
        """Wait for the followers' end, and kill those that take longer."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while any(process.poll() is None for process in self._processes):
            if asyncio.get_running_loop().time() >= end_s:
                for process in self._processes:
                    process.kill()
            await asyncio.sleep(LOOK_S / 10)
