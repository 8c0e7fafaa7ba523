"""The cores that each worker of this host runs on. Pure."""

from collections.abc import Sequence


def core_share(index: int, worker_count: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of worker `index` (from 0). The range is contiguous, so that two workers do not take
    each other's caches and time. With more workers than cores nobody is pinned: each gets all cores."""
    assert 0 <= index < worker_count
    if worker_count > len(cores):
        return tuple(cores)
    first = index * len(cores) // worker_count
    end = (index + 1) * len(cores) // worker_count
    return tuple(cores[first:end])


def thread_count(share: Sequence[int], worker_count: int, core_count: int, asked: int) -> int:
    """Return the number of torch threads of one worker. `asked` is the operator's setting, 0 for none."""
    if asked:
        return asked
    return 1 if worker_count > core_count else max(1, len(share))
