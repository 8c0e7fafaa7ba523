"""How many of the blocks fetched from peers stay here as copies."""

from kv_store.node.context import Context

BURST_S = 2.0
"""Bytes of this many seconds may be kept at once."""
HOT_COUNT = 2
"""A block that is wanted here so often may use the last of the budget."""


class Replication:
    """A token bucket. Blocks that are wanted once use its upper half only, so that hot ones come first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rate_bytes_s = context.config.replicate_bytes_s
        self._burst_bytes = self._rate_bytes_s * BURST_S
        self._tokens_bytes = self._burst_bytes
        self._counted_s = context.now_s

    def may_keep(self, byte_count: int, *, times_seen: int) -> bool:
        """Whether the bytes may be kept. If so, they are taken off the budget."""
        self._refill()
        floor_bytes = 0.0 if times_seen >= HOT_COUNT else self._burst_bytes / 2
        if self._tokens_bytes - byte_count < floor_bytes:
            return False
        self._tokens_bytes -= byte_count
        return True

    def ready_s(self, byte_count: int) -> float | None:
        """Seconds until so many bytes may be kept; None means never."""
        self._refill()
        if byte_count > self._burst_bytes:
            return None
        return max(0.0, (byte_count - self._tokens_bytes) / max(1, self._rate_bytes_s))

    def _refill(self) -> None:
        now_s = self._context.now_s
        self._tokens_bytes += (now_s - self._counted_s) * self._rate_bytes_s
        self._tokens_bytes = min(self._tokens_bytes, self._burst_bytes)
        self._counted_s = now_s
