"""Memory that this process may still take: what limits of the process, its cgroup and the machine leave."""

import resource
from pathlib import Path

import torch

from engine.offload.choice import Room

_CGROUP = Path("/sys/fs/cgroup")
WORKING_BYTES = 64 * 2**20
"""Memory that steps and libraries take beside weights and KV."""
_ENDLESS = 2**60
"""cgroup v1 says that there is no limit by a number near 2^63."""


def memory_room(device: torch.device, *, rank_count: int = 1, pool_bytes: int = 0) -> Room:
    """rank_count: ranks of this host that share the cgroup's limit and the machine. pool_bytes: of the KV
    pool, whose memory counts there only when it is first written."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Room(free, f"{device}", is_hard=True, reserve=WORKING_BYTES)
    own = _status_bytes(Path("/proc/self/status"))
    rooms = [
        Room(limit - own.get(field, 0), name, is_hard=True, reserve=WORKING_BYTES)
        for kind, name, field in (
            (resource.RLIMIT_AS, "the limit of its address space (ulimit -v)", "VmSize"),
            (resource.RLIMIT_DATA, "the limit of its data (ulimit -d)", "VmData"),
        )
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    used = own.get("RssAnon", 0) + own.get("RssShmem", 0) + pool_bytes
    limit = _cgroup_limit()
    if limit is not None:
        left = limit // rank_count - used
        rooms.append(Room(left, "the memory limit of its cgroup", is_hard=True, reserve=WORKING_BYTES))
    available = _status_bytes(Path("/proc/meminfo")).get("MemAvailable", _ENDLESS)
    # Ranks that load at the same time have taken some of their shares.
    left = (available + used) // rank_count - used
    rooms.append(Room(left, "the memory of this machine", is_hard=False, reserve=WORKING_BYTES))
    return min(rooms, key=lambda room: room.byte_count)


def page_cache_bytes() -> int:
    """Bytes of files that the system can keep in memory for this process."""
    available = _status_bytes(Path("/proc/meminfo")).get("MemAvailable", 0)
    limit = _cgroup_limit()
    if limit is None:
        return available
    own = _status_bytes(Path("/proc/self/status"))
    return min(available, limit - own.get("RssAnon", 0) - own.get("RssShmem", 0))


def _status_bytes(file: Path) -> dict[str, int]:
    """Lines of the form "Name:  12 kB"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {one[0].rstrip(":"): int(one[1]) * 1024 for one in words if len(one) == 3 and one[2] == "kB"}


def _cgroup_limit() -> int | None:
    """The least limit of this process's memory cgroup and those above it, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_CGROUP / "memory", "memory.limit_in_bytes") if controllers else (_CGROUP, "memory.max")
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            limits += _limit_in(folder / name)
            if folder == root:
                break
    return min(limits, default=None)


def _limit_in(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < _ENDLESS else []
