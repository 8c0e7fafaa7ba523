"""Where a pool's experts are, and how the rows of tokens travel to them."""

from dataclasses import dataclass
from math import ceil

from baton.config.experts import ExpertsConfig
from baton.core.errors import SetupError
from simulator.models import ModelShape

NODE_GPUS = 8
SPARE_EXPERTS = 2
"""Experts of any layer that a rank has memory for beside its slots, to load into beside its work."""
ROW_BYTES = {"exact": (2.0, 4.0), "model": (2.0, 2.0), "int8": (1.0, 2.0)}
"""Bytes per number to the experts and back, by `experts.rows`. FP8 rows are as long as those of int8."""
SCALE_NUMBERS = 128
"""Numbers of a row that have a scale of four bytes in common, where a number is one byte."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The expert ranks of one pool, one GPU each, on nodes that are filled in turn."""

    ranks: int
    callers: int
    """GPUs that compute attention and send rows. Each is a worker of the pool."""
    slots: int
    """Experts of each layer that a rank holds."""
    is_apart: bool = False
    """Ranks have GPUs of their own, on nodes of their own. Otherwise every caller's GPU is a rank too."""
    node_gpus: int = NODE_GPUS
    sent_bytes: float = 1.0
    """Bytes per number of a row on its way to the experts."""
    returned_bytes: float = 2.0
    once_per_node: bool = False
    """Rows cross the network once per node and are passed on over NVLink; so are their sums on the way back.
    Otherwise a row goes once to each rank that needs it, and comes back once per expert."""
    overlaps: bool = True
    """Large batches are computed as two halves in turn."""

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.node_gpus)

    @property
    def gpu_count(self) -> int:
        return self.callers + self.ranks * self.is_apart


def slots_needed(model: ModelShape, *, ranks: int, replicas: float) -> int:
    """Return the slots of each rank in which experts have `replicas` replicas on average."""
    return min(model.experts, ceil(model.experts * replicas / ranks))


def layout_of(
    config: ExpertsConfig, model: ModelShape, *, workers: int, node_gpus: int, once_per_node: bool
) -> ExpertLayout:
    """Lay out a pool of so many workers of one GPU each, by the settings `experts`. Raises SetupError."""
    is_apart = config.parallel == "ranks"
    ranks = config.ranks if is_apart else workers
    if ranks < 1:
        raise SetupError("experts.parallel=ranks needs experts.ranks: the GPUs of each pool's expert ranks")
    sent, returned = ROW_BYTES[config.rows]
    return ExpertLayout(
        ranks,
        workers,
        slots_needed(model, ranks=ranks, replicas=config.replicas),
        is_apart,
        node_gpus,
        sent,
        returned,
        once_per_node,
        config.overlap,
    )
