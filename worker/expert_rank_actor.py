"""An expert rank as a Ray actor: one process each, which the control plane starts, watches and ends.

This module and what it imports at the top run before torch is imported. Variables and pinning come first,
because torch reads them and counts the cores when it is loaded.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from baton.config import Config
from baton.core import garbage
from baton.telemetry.logs import configure_logs
from baton.wire.sessions import begin_session, give_way
from baton.wire.transport import secure
from control_plane.ray_experts import ExpertRankIdentity, ExpertRankSpec
from engine.lean_torch import import_torch
from worker.actor import node_id, pin_to


class ExpertRankActor:
    """An async actor. `serve` runs for the life of the rank. When it ends, however it ends, the control plane
    kills the process."""

    def __init__(self, spec: ExpertRankSpec, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        pin_to(spec.cores)
        begin_session()
        give_way()  # it may have to load experts at any time
        self._spec = spec
        self._config = Config(**spec.config)
        self._serving: asyncio.Task[str] | None = None
        configure_logs(spec.rank_id, self._config.telemetry)

    async def identity(self) -> ExpertRankIdentity:
        spec = self._spec
        return ExpertRankIdentity(socket.gethostname(), os.getpid(), spec.model, spec.role, node_id())

    async def serve(self) -> str:
        """Serve, and return why the rank ended in good order. Raises SetupError.

        A control plane that was started anew calls it again, and waits for the same end.
        """
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await asyncio.shield(self._serving)

    async def _serve(self) -> str:
        with garbage.uncollected():
            import_torch(self._config.model.device)  # after pinning
            from worker.expert_rank import run_expert_rank

        secure(self._config.tls, self._config.access)
        return await run_expert_rank(self._spec, self._config, node=node_id())
