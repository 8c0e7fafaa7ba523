"""How much memory this process may still take, by the machine and by its control groups."""

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Names of limit and usage in cgroup v2 and v1."""


def available_bytes() -> int:
    """The bytes that may still be taken. Beyond them somebody is killed: the kernel gives no error for memory
    that a control group refuses."""
    return min([psutil.virtual_memory().available, *_cgroup_rooms(own_cgroups())])


def own_cgroups(membership: str | None = None, root: Path = CGROUP_ROOT) -> list[Path]:
    """Folders of this process's memory groups and all above them, by `/proc/self/cgroup` (or by the text
    given instead)."""
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text()
        except OSError:
            return []
    found: list[Path] = []
    for line in membership.splitlines():
        _, _, controllers_path = line.partition(":")
        controllers, _, path = controllers_path.partition(":")
        if controllers in ("", "memory"):
            base = root / controllers
            group = base / path.lstrip("/")
            # In a container the path may be the host's: the group mounted at the root is then our own.
            found += [group, *(p for p in group.parents if p.is_relative_to(base))]
    return found


def _cgroup_rooms(groups: list[Path]) -> list[int]:
    return [room for group in groups for names in _FILES if (room := _room(group, *names)) is not None]


def _room(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        reclaimable = _file_cache_bytes(group)
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - usage + reclaimable)


def _file_cache_bytes(group: Path) -> int:
    """Page cache that counts as used and goes when memory is short. Shared memory is listed elsewhere."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    inactive = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(inactive)
