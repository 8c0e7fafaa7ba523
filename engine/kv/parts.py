"""The KV pools of a worker's ranks, as the rank that leads them sees them."""

from typing import NamedTuple

from engine.kv.pool import KVPool


class PoolPart(NamedTuple):
    """A rank's part of every block of a worker: some layers, and of each some of its key-value heads."""

    layers: range
    """Layers of the whole model."""
    heads: range
    """Key-value heads of the whole model. Ranks may hold the same ones."""
    pool: KVPool
    """Its memory is mapped here, whichever process computes with it. All parts have as many blocks."""
