"""How many experts fit the memory of a rank."""

import torch

from baton.core.errors import SetupError
from engine.offload.memory import WORKING_BYTES, memory_room

RESERVE_BYTES = 2 * WORKING_BYTES
"""Memory that is left free: batches of rows, and what other processes take meanwhile."""
SPARE_EXPERTS = 2
"""Experts that a rank holds beside its slots for the time of an exchange."""


class RankFull(SetupError):
    """The rank has no memory for another expert."""


class ExpertMemory:
    """The limit that is configured, or else what the machine has left."""

    def __init__(self, memory_bytes: float, *, expert_bytes: int, device: torch.device) -> None:
        """memory_bytes: `experts.memory_bytes`; 0: what the process may still take when it starts."""
        self._device, self._expert_bytes = device, expert_bytes
        self._bytes = int(memory_bytes) or max(0, self._left())
        self.is_configured = memory_bytes > 0

    def slots_max(self, layer_count: int, expert_count: int) -> int:
        """Return the experts of each layer that fit, at least 1."""
        fitting = self._bytes // self._expert_bytes - SPARE_EXPERTS
        return min(expert_count, max(1, fitting // layer_count))

    def check(self, held_count: int) -> None:
        """Raises RankFull if another expert than the `held_count` that are there would not fit."""
        if self.is_configured and (held_count + 1) * self._expert_bytes > self._bytes:
            raise RankFull(
                f"{held_count} experts fill experts.memory_bytes ({self._bytes / 2**30:.2f} GiB): raise it, "
                "or start more expert ranks"
            )
        if self._expert_bytes > self._left():
            room = memory_room(self._device)
            raise RankFull(
                f"{room.limit} leaves {room.byte_count / 2**20:.0f} MiB, too little for another expert: "
                "start more expert ranks, or give them more memory"
            )

    def _left(self) -> int:
        return memory_room(self._device).byte_count - RESERVE_BYTES
