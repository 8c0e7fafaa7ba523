"""The blocks of a prompt that the hosts' stores have, as the directory says. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from baton.core.ids import NodeId
from baton.core.store import BlockLocation, Tier

_NONE, _HOST, _SSD, _PEER = range(4)
_CODES = {Tier.HOST: _HOST, Tier.SSD: _SSD}


class StoredRun(NamedTuple):
    """Consecutive blocks that a worker could bring into its pool instead of computing them, by where they
    are: its host's memory, its host's SSD, another host."""

    host: int
    ssd: int
    peer: int

    @property
    def block_count(self) -> int:
        return self.host + self.ssd + self.peer


NOTHING_STORED = StoredRun(0, 0, 0)


class StoredPrefix(msgspec.Struct, frozen=True):
    """One byte per block of the prompt and host with a store node."""

    by_host: dict[str, bytes]

    def run(self, host: str, first: int) -> StoredRun:
        """Return the stored run that a worker of `host` can load, from block `first` to the first block that
        no host has. It is empty for a host without a store node, since only a host's own node can load what
        others have."""
        codes = self.by_host.get(host, b"")
        if first >= len(codes):
            return NOTHING_STORED
        end = codes.find(_NONE, first)
        end = len(codes) if end < 0 else end
        return StoredRun(*(codes.count(code, first, end) for code in (_HOST, _SSD, _PEER)))


def stored_prefix(
    locations: Sequence[tuple[BlockLocation, ...]], host_of: Mapping[NodeId, str]
) -> StoredPrefix | None:
    """`locations` of each block, `host_of` the store nodes. None: nobody has any."""
    by_host = {host: bytearray(len(locations)) for host in set(host_of.values())}
    has_any = False
    for i, holders in enumerate(locations):
        here: dict[str, int] = {}
        for location in holders:
            host = host_of.get(location.node.node_id)
            if host is not None:
                here[host] = min(_CODES.get(location.tier, _PEER), here.get(host, _PEER))
        if here:
            has_any = True
            for host, codes in by_host.items():
                codes[i] = here.get(host, _PEER)
    return StoredPrefix({host: bytes(codes) for host, codes in by_host.items()}) if has_any else None
