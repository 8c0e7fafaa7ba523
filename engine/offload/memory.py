"""Memory that this process may still take: what limits of the process, its cgroup and the machine leave."""

import resource
from pathlib import Path

import torch

from engine.model_files.host_memory import ENDLESS, cgroup_limit, status_bytes
from engine.offload.choice import Room

WORKING_BYTES = 64 * 2**20
"""Memory that steps and libraries take beside weights and KV."""


def memory_room(device: torch.device, *, rank_count: int = 1, pool_bytes: int = 0) -> Room:
    """rank_count: ranks of this host that share the cgroup's limit and the machine. pool_bytes: of the KV
    pool, whose memory counts there only when it is first written."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Room(free, f"{device}", is_hard=True, reserve=WORKING_BYTES)
    own = status_bytes(Path("/proc/self/status"))
    rooms = [
        Room(limit - own.get(field, 0), name, is_hard=True, reserve=WORKING_BYTES)
        for kind, name, field in (
            (resource.RLIMIT_AS, "the limit of its address space (ulimit -v)", "VmSize"),
            (resource.RLIMIT_DATA, "the limit of its data (ulimit -d)", "VmData"),
        )
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    used = own.get("RssAnon", 0) + own.get("RssShmem", 0) + pool_bytes
    limit = cgroup_limit()
    if limit is not None:
        left = limit // rank_count - used
        rooms.append(Room(left, "the memory limit of its cgroup", is_hard=True, reserve=WORKING_BYTES))
    available = status_bytes(Path("/proc/meminfo")).get("MemAvailable", ENDLESS)
    # Ranks that load at the same time have taken some of their shares.
    left = (available + used) // rank_count - used
    rooms.append(Room(left, "the memory of this machine", is_hard=False, reserve=WORKING_BYTES))
    return min(rooms, key=lambda room: room.byte_count)


def page_cache_bytes() -> int:
    """Bytes of files that the system can keep in memory for this process."""
    available = status_bytes(Path("/proc/meminfo")).get("MemAvailable", 0)
    limit = cgroup_limit()
    if limit is None:
        return available
    own = status_bytes(Path("/proc/self/status"))
    return min(available, limit - own.get("RssAnon", 0) - own.get("RssShmem", 0))
