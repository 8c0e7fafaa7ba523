"""A worker as a Ray actor: one process each, which the control plane starts, watches and ends.

This module and what it imports at the top run before torch is imported. Variables and pinning come first,
because torch reads them and counts the cores when it is loaded.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config import Config
from baton.core import garbage
from baton.telemetry.logs import configure_logs
from baton.wire.sessions import begin_session, give_way
from baton.wire.transport import secure
from control_plane.ray_ops import WorkerIdentity, WorkerSpec
from engine.lean_torch import import_torch
from worker.stage_hosts import placed_stages

if TYPE_CHECKING:
    from worker.process import WorkerProcess


SWITCH_S = 0.0005
"""Longest time that a thread may keep Python's lock from another that asks for it. The engine asks after
every kernel of a prompt, while all cores wait; with the usual 5 ms the event loop kept the lock for 1.4 ms in
the mean."""


class WorkerActor:
    """An async actor. `serve` runs for the life of the worker. When it ends, however it ends, the control
    plane kills the process."""

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        pin_to(spec.cores)
        begin_session()
        sys.setswitchinterval(SWITCH_S)
        self._spec, self._made_s = spec, time.monotonic()
        self._config = Config(**spec.config)
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._serving: asyncio.Task[str] | None = None
        self._process: WorkerProcess | None = None
        configure_logs(spec.worker_id, self._config.telemetry)

    async def identity(self) -> WorkerIdentity:
        spec = self._spec
        role = spec.role if self._process is None else self._process.role
        host, pid = socket.gethostname(), os.getpid()
        age_s = time.monotonic() - self._made_s
        return WorkerIdentity(host, pid, spec.model, role, spec.version, age_s, node_id())

    async def serve(self) -> str:
        """Serve, and return why the worker ended in good order. Raises SetupError or WorkerCrashed.

        A control plane that was started anew calls it again, and waits for the same end.
        """
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await asyncio.shield(self._serving)

    async def _serve(self) -> str:
        with garbage.uncollected():
            import_torch(self._config.model.device)  # after pinning
            from worker.process import WorkerProcess

        spec = self._spec
        secure(self._config.tls, self._config.access)
        stages = await placed_stages(spec.worker_id, self._config, spec.control_address)
        self._process = process = WorkerProcess(
            spec.worker_id,
            spec.role,
            self._config,
            control_address=spec.control_address,
            node=node_id(),
            version=spec.version,
            stages=stages,
            gpus=reserved_gpus(),
        )
        await process.run(stop=self._stop, stop_now=self._stop_now, on_ready=self._on_ready)
        return "drained"

    def _on_ready(self, _: object) -> None:
        """Give way from now on; the load needed the cores."""
        give_way()

    async def drain(self) -> None:
        """Finish what is held, then let `serve` return."""
        self._stop.set()


def node_id() -> str:
    """Ray's id of the node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def reserved_gpus() -> float:
    """Return the GPUs that Ray reserved for this actor; 0 for none."""
    import ray

    return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))


def pin_to(cores: tuple[int, ...]) -> None:
    """Pin all threads of this process, and so every thread that they will start. Empty `cores` changes
    nothing."""
    if not cores:
        return
    # The call is per thread, and Ray has started some already.
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it ended meanwhile
