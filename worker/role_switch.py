"""A running worker takes another role: weights, adapters and KV pool stay where they are."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.messages import Role
from worker import events as e

log = logging.getLogger(__name__)


class RoleSwitcher:
    """Switches the worker's role, one change at a time. The change that was asked for last counts."""

    def __init__(
        self,
        post: Callable[[e.WorkerEvent], None],
        idle: asyncio.Event,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`idle` is set while the worker holds nothing."""
        self._post, self._idle, self._spawn = post, idle, spawn
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def ask(self, role: Role, drain_s: float) -> None:
        """Change the role, and return at once. With `drain_s` 0 the role changes at once too, and what runs
        goes on beside it."""
        if self._is_closed:
            return  # the worker is leaving
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if drain_s <= 0:
            self._post(e.SetRole(role, resumes=True))
            return
        self._task = self._spawn(self._switch_role(role, drain_s))

    async def _switch_role(self, role: Role, drain_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._post(e.Drain())
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("the worker is not idle within %g s: what is left runs beside the new role", drain_s)
        drained_s = loop.time()
        self._post(e.SetRole(role, resumes=True))
        log.info("the worker has the role %s now, after draining for %.3f s", role, drained_s - began_s)

    def close(self) -> None:
        """Change no role any more; the worker may be drained for good now."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
