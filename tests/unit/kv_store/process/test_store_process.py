"""A whole store node in this process, spoken to as workers and peers do; memory, files, sockets are real."""

import asyncio
import contextlib
import mmap
import os
import shutil
import socket

import msgspec
import pytest

from baton.config import Config
from baton.core.errors import IncompatiblePeer, SetupError
from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.store import (
    BlockFacts,
    BlocksReady,
    BlocksRefused,
    BlocksWritten,
    EndLoad,
    FindBlocks,
    FoundBlocks,
    LoadBlocks,
    LoadFailed,
    NodeHello,
    NodeRef,
    OfferBlocks,
    StoreHello,
    TakeBlocks,
    Tier,
)
from baton.core.store_admin import AskClear, AskDrain, AskStatus, Done, NodeStatus
from baton.wire.link import LinkBroken
from baton.wire.local import ask_store, store_session
from baton.wire.store_nodes import ask_node, node_session
from kv_store.checksum import checksum
from kv_store.directory.memory import MemoryDirectory
from kv_store.process.store_node import StoreProcess
from kv_store.ssd.block_file import BlockFile

BLOCK_BYTES = 6000
SLOT_BYTES = 8192
HOST_BLOCKS = 16


def hashes(count, *, of="x"):
    return tuple(BlockHash(f"{of}{index}".encode().ljust(HASH_BYTES, b".")) for index in range(count))


def content(block_hash):
    return bytes(block_hash) * (BLOCK_BYTES // HASH_BYTES)


def config(path, **store):
    return Config(
        store={"socket": str(path), "host_bytes": HOST_BLOCKS * SLOT_BYTES, "policy": "lru", **store},
        cluster={"member_lease_s": 1.2, "drain_timeout_s": 5.0},
        transfer={"backends": ("tcp",)},
    )


class Node:
    """`StoreProcess` in a task; ends it in good order, or as a crash does: without a word to anybody."""

    def __init__(self, name, config, directory=None):
        self.process = StoreProcess(NodeId(name), config, directory=directory)
        self.config, self.stop, self.stop_now = config, asyncio.Event(), asyncio.Event()

    async def __aenter__(self):
        ready = asyncio.get_running_loop().create_future()
        running = self.process.run(stop=self.stop, stop_now=self.stop_now, on_ready=ready.set_result)
        self.task = asyncio.create_task(running)
        await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        self.address = ready.result().address
        return self

    async def __aexit__(self, *_):
        self.stop.set()
        async with asyncio.timeout(20):
            await self.task

    async def status(self):
        return await ask_store(self.config.store.socket, AskStatus())

    async def until(self, holds):
        """Asks the node for its status until it is so."""
        async with asyncio.timeout(10):
            while not holds(status := await self.status()):
                pass
        return status


class Worker:
    """Speaks the protocol by hand and shares the arena."""

    def __init__(self, session):
        self.link, self.welcome = session.link, session.welcome
        size = session.welcome.slot_bytes * session.welcome.slot_count
        self.memory = mmap.mmap(session.descriptor, size)
        self._next_id = 0

    async def hear(self, kind):
        async with asyncio.timeout(10):
            message = await anext(self.link)
        assert isinstance(message, kind), message
        return message

    def new_id(self):
        self._next_id += 1
        return self._next_id

    async def store(self, chain, *, tenant=""):
        """Returns how many of the blocks the node took."""
        offer_id = self.new_id()
        parents = (BlockHash(bytes(HASH_BYTES)), *chain[:-1])
        facts = [
            BlockFacts(h, parent, depth, 0.1, tenant)
            for depth, (h, parent) in enumerate(zip(chain, parents, strict=True))
        ]
        self.link.send(OfferBlocks(offer_id, tuple(facts)))
        taken = await self.hear(TakeBlocks)
        sums = []
        for place in taken.places:
            start = place.slot * self.welcome.slot_bytes
            self.memory[start : start + BLOCK_BYTES] = content(chain[place.index])
            sums.append(checksum(content(chain[place.index])))
        self.link.send(BlocksWritten(offer_id, tuple(sums)))
        return len(taken.places)

    async def find(self, chain):
        self.link.send(FindBlocks(self.new_id(), chain, 0))
        return {span.tier: span.block_count for span in (await self.hear(FoundBlocks)).spans}

    async def load(self, chain):
        """Returns the bytes of the blocks that came, and their tiers."""
        load_id, found, tiers = self.new_id(), [], []
        self.link.send(LoadBlocks(load_id, chain, 5.0))
        while len(found) < len(chain):
            message = await self.hear(BlocksReady | LoadFailed)
            if isinstance(message, LoadFailed):
                print(message)
                break
            tiers += message.tiers
            for slot in message.slots:
                start = slot * self.welcome.slot_bytes
                found.append(self.memory[start : start + BLOCK_BYTES])
        self.link.send(EndLoad(load_id))
        return found, tiers

    async def loads(self, chain):
        """The tiers that the chain came from; it must come whole and right."""
        found, tiers = await self.load(chain)
        assert [data[: len(content(h))] for data, h in zip(found, chain, strict=True)] == list(
            map(content, chain)
        )
        return set(tiers)


@contextlib.asynccontextmanager
async def worker(node, name="w.1"):
    hello = StoreHello(WorkerId(name), "fingerprint", BLOCK_BYTES)
    async with store_session(node.config.store.socket, hello) as session:
        client = Worker(session)
        try:
            yield client
        finally:
            client.memory.close()


async def test_blocks_outlive_the_worker_that_stored_them(tmp_path):
    chain = hashes(4)
    async with Node("n.1", config(tmp_path / "s")) as node:
        async with worker(node) as first:
            assert await first.store(chain) == 4
            assert await first.store(chain) == 0, "known already"
        async with worker(node, "w.2") as second:
            assert await second.find(hashes(6)) == {Tier.HOST: 4}
            assert await second.loads(chain) == {Tier.HOST}
            assert await second.find(hashes(3, of="y")) == {}
        status = await node.until(lambda s: not s.accounts["worker_count"])
        assert status.accounts["host.block_count"] == 4
        assert status.accounts["host.pinned_count"] == 0
        assert status.accounts["loaded_blocks.host"] == 4


async def test_blocks_beyond_host_memory_come_from_ssd_also_in_the_next_life(tmp_path):
    settings = config(tmp_path / "s", ssd_dir=str(tmp_path / "ssd"), ssd_io="buffered")
    chains = [hashes(6, of=name) for name in "abcdef"]
    async with Node("n.1", settings) as node, worker(node) as client:
        await node.until(lambda s: node.process._disks._files)
        for chain in chains:
            taken_count = await client.store(chain)
            await client.loads(chain[:taken_count])  # seen again: worth a write
            await node.until(lambda s: not s.accounts["io_in_flight"])  # what is written cannot make room
        kept = [chain for chain in chains if (await client.find(chain)).get(Tier.SSD)]
        assert kept
        assert await client.loads(kept[0][:1]) == {Tier.SSD}
        await node.until(lambda s: not s.accounts["io_in_flight"])
    async with Node("n.2", settings) as node, worker(node) as client:
        await node.until(lambda s: s.accounts["ssd.block_count"])
        assert await client.loads(kept[0][:1]) == {Tier.SSD}


async def test_two_nodes_fetch_from_each_other(tmp_path):
    directory, chain = MemoryDirectory(entries_max=1000), hashes(4)
    one = Node("n.1", config(tmp_path / "1"), directory)
    two = Node("n.2", config(tmp_path / "2"), directory)
    async with one, two, worker(one, "w.1") as near, worker(two, "w.2") as far:
        await near.store(chain)
        await one.until(lambda s: s.peers)
        await two.until(lambda s: s.peers)
        async with asyncio.timeout(10):
            while await far.find(chain) != {Tier.PEER: 4}:
                pass
        assert await far.loads(chain) == {Tier.PEER}
        status = await two.status()
        assert status.accounts["fetched_bytes"] == 4 * BLOCK_BYTES
        assert await far.loads(chain) == {Tier.HOST}, "copies stay"
        assert isinstance(await ask_node(one.address, AskStatus()), NodeStatus)


async def test_a_node_that_leaves_hands_its_blocks_to_a_peer(tmp_path):
    directory, chain = MemoryDirectory(entries_max=1000), hashes(4)
    async with Node("n.2", config(tmp_path / "2"), directory) as two, worker(two, "w.2") as far:
        async with Node("n.1", config(tmp_path / "1"), directory) as one:
            async with worker(one, "w.1") as near:
                await near.store(chain)
            await one.until(lambda s: s.peers)
            await two.until(lambda s: s.peers)
        assert await far.loads(chain) == {Tier.HOST}


def hello_of(**fields):
    ours = NodeHello(NodeRef(NodeId("x.1"), "127.0.0.1:9"), SLOT_BYTES, BLOCK_BYTES, {})
    return msgspec.structs.replace(ours, **fields)


async def refusal(node, hello):
    with pytest.raises(IncompatiblePeer) as caught:
        async with node_session(node.address, hello):
            pass
    return str(caught.value)


async def test_peers_that_do_not_agree_part_and_nonsense_ends_a_session_only(tmp_path):
    async with Node("n.1", config(tmp_path / "s")) as node:
        assert "no blocks of 6000 bytes" in await refusal(node, hello_of())
        async with worker(node) as client:
            await client.store(hashes(2))
            assert "in slots of 12288" in await refusal(node, hello_of(slot_bytes=12288))
            assert "store version 99" in await refusal(node, hello_of(wire_version=99))
            async with node_session(node.address, hello_of()) as (theirs, link):
                assert theirs.node.node_id == "n.1"
                link.send(BlocksRefused(1, 0, "an answer to nothing"))
                async with asyncio.timeout(10):
                    with contextlib.suppress(LinkBroken):
                        async for _ in link:
                            pass
            assert await client.loads(hashes(2)) == {Tier.HOST}


async def test_an_operator_clears_and_drains(tmp_path):
    chain = hashes(4)
    async with Node("n.1", config(tmp_path / "s")) as node, worker(node) as client:
        await client.store(chain[:2], tenant="a")
        await client.store(hashes(2, of="b"), tenant="b")
        assert set((await node.status()).tenants) == {("a", 2 * SLOT_BYTES, 0), ("b", 2 * SLOT_BYTES, 0)}
        assert (await ask_store(node.config.store.socket, AskClear(tenant="a"))).text.startswith("2 blocks")
        assert await client.find(chain) == {}
        assert await client.find(hashes(2, of="b")) == {Tier.HOST: 2}
        assert (await node.status()).accounts["host.dropped.cleared"] == 2
        await ask_node(node.address, AskDrain())
        assert (await node.status()).is_draining
        assert await client.store(hashes(1, of="c")) == 0


async def test_two_block_sizes_share_the_host_memory(tmp_path):
    async with Node("n.1", config(tmp_path / "s")) as node, worker(node) as client:
        await client.store(hashes(8))
        hello = StoreHello(WorkerId("big.1"), "other", 2 * SLOT_BYTES)
        async with store_session(node.config.store.socket, hello) as session:
            assert session.welcome.slot_bytes == 2 * SLOT_BYTES
            assert os.fstat(session.descriptor).st_size <= HOST_BLOCKS * SLOT_BYTES
            other = Worker(session)
            await other.store(hashes(6, of="big"))
            other.memory.close()
        status = await node.status()
        assert status.accounts["host.bytes"] <= HOST_BLOCKS * SLOT_BYTES


async def test_metrics_name_what_happened(tmp_path):
    async with Node("n.1", config(tmp_path / "s")) as node, worker(node) as client:
        await client.store(hashes(3))
        await client.loads(hashes(3))
        text = node.process._render().decode()
    assert 'baton_store_loaded_blocks_total{tier="host"} 3.0' in text
    assert 'baton_store_stored_blocks_total{tier="host"} 3.0' in text
    assert "baton_store_load_seconds_count 1.0" in text


async def test_an_unusable_folder_costs_the_ssd_tier_only(tmp_path):
    (tmp_path / "file").write_text("no folder")
    settings = config(tmp_path / "s", ssd_dir=str(tmp_path / "file"))
    async with Node("n.1", settings) as node, worker(node) as client:
        await client.store(hashes(2))
        await node.until(lambda s: any("ssd_dir" in note for note in s.notes))
        assert await client.loads(hashes(2)) == {Tier.HOST}


def with_ssd(tmp_path):
    return config(tmp_path / "s", ssd_dir=str(tmp_path / "ssd"), ssd_bytes=2**20, ssd_io="buffered")


async def on_ssd(node, client):
    """A chain of which SSD holds some, so that the next life would find it."""
    await node.until(lambda s: node.process._disks._files)
    for name in "abcdef":
        chain = hashes(6, of=name)
        taken_count = await client.store(chain)
        await client.loads(chain[:taken_count])  # seen again: worth a write
    await node.until(lambda s: s.accounts["ssd.block_count"] and not s.accounts["io_in_flight"])


def found_after_a_crash(folder, copy):
    """Blocks in the files as they are at this moment."""
    shutil.copytree(folder, copy)
    file, found = BlockFile.open(copy, block_bytes=BLOCK_BYTES, slot_bytes=SLOT_BYTES, slot_count=64)
    file.close()
    return found


async def test_what_was_cleared_is_not_found_after_a_crash(tmp_path):
    settings = with_ssd(tmp_path)
    async with Node("n.1", settings) as node, worker(node) as client:
        await on_ssd(node, client)
        assert found_after_a_crash(tmp_path / "ssd", tmp_path / "before")
        assert isinstance(await ask_store(settings.store.socket, AskClear()), Done)
        assert not found_after_a_crash(tmp_path / "ssd", tmp_path / "after")


async def test_what_is_cleared_while_files_are_still_being_read_is_gone(tmp_path):
    settings = with_ssd(tmp_path)
    async with Node("n.1", settings) as node, worker(node) as client:
        await on_ssd(node, client)
    async with Node("n.2", settings) as node:
        assert isinstance(await ask_node(node.address, AskClear()), Done)
        assert not (await node.status()).accounts["ssd.block_count"]
    assert not found_after_a_crash(tmp_path / "ssd", tmp_path / "after")


async def test_memory_that_is_not_there_is_told_before_the_node_is_ready(tmp_path):
    with pytest.raises(SetupError, match="host_bytes"):
        async with Node("n.1", config(tmp_path / "s", host_bytes=2**60)):
            pass


def two_free_ports():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


async def test_ports_can_be_chosen(tmp_path):
    """As in a pod, where Prometheus and network policies must know them beforehand."""
    grpc, metrics = two_free_ports()
    async with Node("a", config(tmp_path / "s", port=grpc, metrics_port=metrics)) as node:
        status = await node.status()
    assert (status.address, status.metrics_address) == (f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}")
