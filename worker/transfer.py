"""The transfer backends of a worker over the KV pools of its ranks, and the checksums of what it sends."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.ids import WorkerId
from baton.core.transfer_backends import BackendName
from engine.kv.pairs import TorchPairs
from engine.kv.parts import PoolPart
from engine.kv.pool import KVPool
from kv_transfer.backend import KVMemory
from kv_transfer.checksums import WholeChecksums
from kv_transfer.layout import Places
from kv_transfer.manager import TransferManager
from kv_transfer.part_plan import part_name
from kv_transfer.part_transfer import OwnPart, PartTransfer
from kv_transfer.registry import BackendSite, build_backends
from worker.grant_checksums import GrantChecksums, Send


def part_memories(parts: Sequence[PoolPart]) -> list[tuple[Places, KVMemory]]:
    """The pools as transfer backends see them. The worker gives blocks out for all of its ranks at once, so
    one table of generations, that of the leader's pool, holds for every part."""
    generations = parts[0].pool.generations
    return [
        (
            Places(part.layers, part.heads),
            KVMemory(
                base_address=part.pool.base_address,
                block_bytes=part.pool.block_bytes,
                block_count=part.pool.block_count,
                generations=generations,
                device=str(part.pool.device),
            ),
        )
        for part in parts
    ]


def part_manager(
    name: WorkerId, pool: KVPool, memory: KVMemory, backends: Sequence[BackendName], *, host: str
) -> TransferManager:
    """Make the manager of one part, without starting it. `host` is this machine as peers reach it."""
    site = BackendSite(name, memory, host, make_pairs=lambda: TorchPairs(pool.memory, host=host))
    return TransferManager(build_backends(backends, site), memory=memory)


def part_transfer(
    worker_id: WorkerId,
    parts: Sequence[PoolPart],
    whole: KVGeometry,
    config: Config,
    *,
    host: str,
    others: Sequence[OwnPart] = (),
) -> PartTransfer:
    """Make the transfer, without starting it. `host` is this machine as peers reach it, and `others` are the
    parts that other processes have. Raises SetupError for checksums of blocks that are not in host memory."""
    own: list[OwnPart] = []
    for number, (part, (places, memory)) in enumerate(zip(parts, part_memories(parts), strict=True)):
        if config.transfer.checksums and not memory.is_host:
            raise SetupError(
                f"transfer.checksums needs a KV pool in host memory, not on {memory.device}: set it to false"
            )
        name = part_name(worker_id, number, len(parts) + len(others))
        manager = part_manager(name, part.pool, memory, config.transfer.backends, host=host)
        own.append(OwnPart(places, memory, manager))
    return PartTransfer(whole, [*own, *others])


def grant_sender(
    parts: Sequence[PoolPart],
    whole: KVGeometry,
    config: Config,
    send: Send,
    *,
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
) -> Send:
    """Return `send`, with checksums filled into grants on the way if so configured."""
    if not config.transfer.checksums:
        return send
    return GrantChecksums(WholeChecksums(whole, part_memories(parts)), send, spawn=spawn).send
