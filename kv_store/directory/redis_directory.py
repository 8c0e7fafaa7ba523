"""The directory in Redis: one hash per node, whose expiry is the node's lease. See `redis_scripts`.

A look-up asks every node's hash for every block. That costs the server about 0.4 µs for each pair, so that
many hosts want a Redis Cluster, over whose servers the nodes spread (docs/decisions/0022).
"""

import logging
from collections.abc import Iterable, Sequence

import msgspec

from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, NodeRef, StoreChanges, StoreMember, Tier
from kv_store.directory import redis_scripts as scripts
from kv_store.directory.interface import GONE_S
from kv_store.directory.redis_client import Command, RedisClient

log = logging.getLogger(__name__)

LOOK_UP_HASHES_MAX = 1024
"""Hashes of one round trip; the server does nothing else meanwhile."""

_CHAR = {Tier.HOST: b"h", Tier.SSD: b"s", Tier.PEER: b"p"}
_TIER_OF = {char[0]: tier for tier, char in _CHAR.items()}


class RedisDirectory:
    """Implements `kv_store.directory.interface.Directory`. It reconnects by itself.

    `name` sets clusters apart that share a Redis.
    """

    def __init__(self, client: RedisClient, *, name: str) -> None:
        self._client = client
        self._prefix = f"baton:{name}"
        self._index = f"{self._prefix}:nodes"
        """A set of node ids that are members, or were not long ago. Every renewal of a lease renews it."""
        self._seen: frozenset[NodeId] = frozenset()
        """Nodes that the last look-up found: the next one asks them in its first round trip."""
        self._acknowledged: dict[NodeId, int] = {}
        """The number of the last message that was taken in, for the nodes that publish through this
        client."""

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        node_id, lease_ms = member.node.node_id, max(1, round(lease_s * 1000))
        acknowledged = self._acknowledged.get(node_id, "")
        values = (msgspec.msgpack.encode(member), member.node.address, lease_ms, acknowledged)
        async with self._client.deadline():
            (state,) = await self._client.run(self._eval(scripts.RENEW, [node_id], *values))
            if state != scripts.KNOWN:
                self._acknowledged.pop(node_id, None)
            if state != scripts.GONE:
                await self._client.run(("SADD", self._index, node_id))
        return state == scripts.KNOWN

    async def leave(self, node_id: NodeId) -> None:
        self._acknowledged.pop(node_id, None)
        async with self._client.deadline():
            await self._client.run(self._eval(scripts.LEAVE, [node_id], round(GONE_S * 1000)))
            await self._client.run(("SREM", self._index, node_id))

    async def members(self) -> tuple[StoreMember, ...]:
        async with self._client.deadline():
            return await self._members()

    async def publish(self, changes: StoreChanges) -> bool:
        stored = b"".join([block_hash + _CHAR[tier] for block_hash, tier in changes.stored])
        removed = b"".join(changes.removed)
        assert len(stored) == (HASH_BYTES + 1) * len(changes.stored)
        assert len(removed) == HASH_BYTES * len(changes.removed)
        begins = int(changes.is_snapshot and changes.is_first)
        command = (scripts.PUBLISH, [changes.node_id], changes.sequence_number, begins, removed, stored)
        async with self._client.deadline():
            (state,) = await self._client.run(self._eval(*command))
        if state == scripts.KNOWN:
            before = self._acknowledged.get(changes.node_id, changes.sequence_number)
            self._acknowledged[changes.node_id] = max(before, changes.sequence_number)
        else:
            self._acknowledged.pop(changes.node_id, None)
        return state == scripts.KNOWN

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        found: list[tuple[BlockLocation, ...]] = []
        async with self._client.deadline():
            for start in range(0, len(hashes), LOOK_UP_HASHES_MAX):
                found += await self._look_up(hashes[start : start + LOOK_UP_HASHES_MAX])
        return found

    async def close(self) -> None:
        await self._client.close()

    async def _members(self) -> tuple[StoreMember, ...]:
        (raw_ids,) = await self._client.run(("SMEMBERS", self._index))
        node_ids = sorted(NodeId(raw.decode()) for raw in raw_ids)
        if not node_ids:
            return ()
        found = await self._client.run(*(("HGET", self._key(node_id), "member") for node_id in node_ids))
        await self._forget(node_id for node_id, raw in zip(node_ids, found, strict=True) if raw is None)
        return tuple(member for raw in found if raw is not None and (member := _member(raw)) is not None)

    async def _look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        """Look hashes up in one round trip, or two when a node is new."""
        text, asked = b"".join(hashes), sorted(self._seen)
        assert len(text) == HASH_BYTES * len(hashes)
        raw_ids, *answers = await self._client.run(("SMEMBERS", self._index), *self._asking(asked, text))
        new = sorted({NodeId(raw.decode()) for raw in raw_ids} - self._seen)
        if new:
            answers += await self._client.run(*self._asking(new, text))
        replies = zip(asked + new, self._by_node(answers), strict=True)
        tiers: dict[NodeRef, bytes] = {}
        lapsed: list[NodeId] = []
        for node_id, answer in replies:
            if answer is None:
                lapsed.append(node_id)
            else:
                tiers[NodeRef(node_id, answer[0].decode())] = answer[1]
        self._seen = frozenset(node.node_id for node in tiers)
        await self._forget(lapsed)
        return _locations(tiers, len(hashes))

    def _asking(self, node_ids: Sequence[NodeId], text: bytes) -> list[Command]:
        """Commands for a look-up: one for all nodes on one server, or one for each where nodes live on
        several."""
        if self._client.is_cluster:
            return [self._eval(scripts.LOOK_UP, [node_id], text) for node_id in node_ids]
        return [self._eval(scripts.LOOK_UP, node_ids, text)] if node_ids else []

    def _by_node(self, answers: Sequence[list[list[bytes] | None]]) -> list[list[bytes] | None]:
        return [answer for several in answers for answer in several]

    async def _forget(self, node_ids: Iterable[NodeId]) -> None:
        """Take nodes without a lease off the index; a node that was only held up puts itself back."""
        gone = list(node_ids)
        if gone:
            await self._client.run(("SREM", self._index, *gone))

    def _key(self, node_id: NodeId) -> str:
        return f"{self._prefix}:node:{node_id}"

    def _eval(self, script: str, node_ids: Sequence[NodeId], *values: object) -> Command:
        return ("EVAL", script, len(node_ids), *map(self._key, node_ids), *values)


def _member(raw: bytes) -> StoreMember | None:
    try:
        return msgspec.msgpack.decode(raw, type=StoreMember)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # an entry of another version
        log.debug("a member that cannot be read: %s", error)
        return None


def _locations(tiers: dict[NodeRef, bytes], count: int) -> list[tuple[BlockLocation, ...]]:
    """Locations out of `tiers`, which has for each node one character per block, or none at all."""
    found: list[list[BlockLocation]] = [[] for _ in range(count)]
    for node in sorted(tiers, key=lambda node: node.node_id):
        locations = {char: BlockLocation(node, tier) for char, tier in _TIER_OF.items()}
        for index, char in enumerate(tiers[node]):
            if (location := locations.get(char)) is not None:
                found[index].append(location)
    return list(map(tuple, found))
