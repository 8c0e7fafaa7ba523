"""The cores and devices that each worker of this host runs on. Pure."""

from collections.abc import Collection, Sequence
from itertools import count

from baton.core.shape import cores_of_rank


class RankNumbers:
    """The numbers of the ranks of a machine, by replica. They decide which cores a replica runs on."""

    def __init__(self) -> None:
        self._held: dict[str, range] = {}

    def first(self, name: str, rank_count: int, *, present: Collection[str]) -> int:
        """Return the first number of a replica that starts now. A replica keeps its numbers over restarts.
        One with another number of ranks than before gets the lowest numbers that nobody else in `present`
        holds."""
        others = {other: held for other, held in self._held.items() if other in present and other != name}
        mine = self._held.get(name)
        taken = {number for held in others.values() for number in held}
        if mine is None or len(mine) != rank_count or not taken.isdisjoint(mine):
            first = next(i for i in count() if taken.isdisjoint(range(i, i + rank_count)))
            mine = range(first, first + rank_count)
        self._held = {**others, name: mine}
        return mine.start


def worker_cores(first: int, rank_count: int, ranks_in_all: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of the worker whose ranks are `first` and those that follow it, out of the ranks of
    all workers. Workers beyond the number that was configured share the cores of the first ones."""
    shares = (cores_of_rank(cores, (first + i) % ranks_in_all, ranks_in_all) for i in range(rank_count))
    return tuple(sorted({core for share in shares for core in share}))


def thread_count(
    share: Sequence[int], ranks_in_all: int, core_count: int, asked: int, *, rank_count: int = 1
) -> int:
    """Return the number of torch threads of one rank of a worker that has the cores `share`. `asked` is the
    operator's setting, 0 for none."""
    if asked:
        return asked
    return 1 if ranks_in_all > core_count else max(1, len(share) // rank_count)


def gpu_share(device_count: float, worker_count: int) -> float:
    """Return a part of a GPU in Ray's resolution of 1/10000, rounded down so that all workers fit."""
    if device_count >= worker_count:
        return 1.0
    per_device = -(-worker_count // max(1, int(device_count)))
    return int(10_000 / per_device) / 10_000 if device_count else 0.0


def gpus_of_worker(rank_count: int, all_rank_counts: Sequence[int], device_count: float) -> float:
    """Return the GPUs that Ray reserves for one worker of a machine. Each of several ranks has a GPU of its
    own; workers of one process share what these leave."""
    if rank_count > 1:
        return float(rank_count)
    taken = sum(count for count in all_rank_counts if count > 1)
    singles = sum(count == 1 for count in all_rank_counts)
    return gpu_share(max(0.0, device_count - taken), max(1, singles))
