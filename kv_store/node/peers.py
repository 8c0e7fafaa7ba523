"""Blocks that other hosts have."""

from collections.abc import Callable, Sequence

from baton.core.ids import BlockHash
from kv_store.node.bringing import Bringer, Fill
from kv_store.node.context import Context
from kv_store.node.counts import PathMeter
from kv_store.node.spaces import Space


class PeerFetches:
    def __init__(self, context: Context, bringer: Bringer) -> None:
        self._context = context
        self._bringer = bringer
        self.meter = PathMeter(second_per_byte=1e-9, latency_s=0.005)
        self.peer_count = 0
        self.fetch_count = 0

    def read_slots(self) -> list[tuple[Space, int]]:
        return []

    def saw(self, hashes: Sequence[BlockHash]) -> None:
        del hashes

    def look_up(self, hashes: Sequence[BlockHash], then: Callable[[], None]) -> bool:
        del hashes, then
        return False

    def has_holder(self, block_hash: BlockHash) -> bool:
        del block_hash
        return False

    def predict(self, space: Space) -> tuple[float, float]:
        del space
        return 0.0, 0.0

    def request(self, fills: Sequence[Fill]) -> None:
        for fill in fills:
            self._bringer.failed(fill, "no peer has it")

    def cancel(self, fill: Fill) -> None:
        self._bringer.forget(fill)
