"""Memory of this host, and of this process in it, as the kernel tells. No torch here."""

import contextlib
import ctypes
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
ENDLESS = 2**60
"""Larger numbers are no limits: cgroup v1 says that there is none by a number near 2^63."""


def memory_limit() -> int:
    """Bytes that processes of this host and control group can have together."""
    total = status_bytes(Path("/proc/meminfo")).get("MemTotal", ENDLESS)
    limit = cgroup_limit()
    return total if limit is None else min(total, limit)


def own_bytes() -> dict[str, int]:
    """Resident memory of this process: RssAnon, RssFile and RssShmem."""
    return status_bytes(Path("/proc/self/status"))


def resident_at(address: int) -> int:
    """Resident bytes of this process's mapping that has the address; 0: it cannot be told."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps") as lines:
        is_here = False
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                begin, _, end = first.partition("-")
                is_here = int(begin, 16) <= address < int(end, 16)
            elif is_here and first == "Rss:":
                return int(rest.split()[0]) * 1024
    return 0


def give_back_free_memory() -> None:
    """Give the system what the C library keeps of freed memory, a great deal after loading a model."""
    with contextlib.suppress(AttributeError):  # C libraries other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(file: Path) -> dict[str, int]:
    """Lines of the form "Name:  12 kB"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {one[0].rstrip(":"): int(one[1]) * 1024 for one in words if len(one) == 3 and one[2] == "kB"}


def cgroup_limit() -> int | None:
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
    return [int(text)] if text.isdigit() and int(text) < ENDLESS else []
