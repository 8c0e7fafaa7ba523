"""Checksums of granted blocks, computed on a thread on the grant's way out.

The core grants, and never sees a block's bytes. A granted block is held by its lease and its content is
committed, so its checksum is the same whenever it is computed while the grant means anything. If the lease
ends meanwhile, the generations tell the reader before the checksums do.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from baton.core.ids import WorkerId
from baton.core.messages import KVGrant, OwnerMessage

Checksums = Callable[[Sequence[int]], list[int]]
"""A function that computes the checksums of blocks. It is called on a thread."""
Send = Callable[[WorkerId, OwnerMessage], None]


class GrantChecksums:
    """Sends messages to readers, with checksums in their grants. Messages to one reader leave in the order in
    which they came. It belongs to the event loop."""

    def __init__(
        self,
        checksums: Checksums,
        send: Send,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._checksums, self._send, self._spawn = checksums, send, spawn
        self._lines: dict[WorkerId, deque[OwnerMessage]] = {}
        """Messages that wait, by reader. The queues are as short as leases are: a grant answers a KV request
        or a computed chunk."""

    def send(self, reader: WorkerId, message: OwnerMessage) -> None:
        line = self._lines.get(reader)
        if line is not None:
            line.append(message)
        elif isinstance(message, KVGrant) and message.source_blocks:
            self._lines[reader] = deque([message])
            self._spawn(self._run(reader))
        else:
            self._send(reader, message)

    async def _run(self, reader: WorkerId) -> None:
        line = self._lines[reader]
        while line:
            message = line[0]
            if isinstance(message, KVGrant) and message.source_blocks:
                sums = await asyncio.to_thread(self._checksums, message.source_blocks)
                message = msgspec.structs.replace(message, checksums=tuple(sums))
            line.popleft()
            self._send(reader, message)
        del self._lines[reader]
