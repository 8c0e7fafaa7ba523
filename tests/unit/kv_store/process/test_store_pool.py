"""Copies between a real KV pool and a real arena."""

import os

import pytest
import torch

from baton.core.geometry import KVGeometry
from baton.core.ids import NodeId
from baton.core.store import StoreWelcome
from engine.kv.parts import PoolPart
from engine.kv.pool import KVPool
from kv_store.arena import Arena, slot_bytes_for
from kv_store.checksum import checksum
from kv_transfer.layout import Places, part_geometry
from tests.contract.transfer_peer import cut
from tests.kv_parts import GEOMETRIES, SHAPES, places_of_shape, random_blocks
from worker import store_pool
from worker.store_pool import DeviceCopies, HostCopies, copies_of

GEOMETRY = KVGeometry(layer_count=2, kv_head_count=3, head_dim=8, block_tokens=4, dtype="float32")
BLOCKS, SLOTS = 6, 9
SLOT_BYTES = slot_bytes_for(GEOMETRY.block_bytes)
WELCOME = StoreWelcome(NodeId("n"), SLOT_BYTES, SLOTS, has_checksums=True)


def make_pool(device):
    pool = KVPool(GEOMETRY, kv_bytes=BLOCKS * GEOMETRY.block_bytes, device=torch.device(device))
    content = torch.empty_like(pool.memory, device="cpu")
    pool.memory.copy_(content.random_(0, 256, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.fixture
def pool():
    return make_pool("cpu")


def staged(pool, descriptor, welcome):
    """As for a pool on a GPU, with room for two blocks at a time."""
    arena = Arena.attach(os.dup(descriptor), welcome.slot_bytes, welcome.slot_count)
    return DeviceCopies([whole_part(pool)], GEOMETRY, arena, has_checksums=welcome.has_checksums)


def mapped(pool, descriptor, welcome):
    return copies_of([whole_part(pool)], GEOMETRY)(descriptor, welcome)


def whole_part(pool):
    return PoolPart(range(GEOMETRY.layer_count), range(GEOMETRY.kv_head_count), pool)


@pytest.fixture
def small_staging(monkeypatch):
    monkeypatch.setattr(store_pool, "STAGING_BYTES", 4 * GEOMETRY.block_bytes)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = [
    pytest.param("cpu", mapped, id="host"),
    pytest.param("cpu", staged, id="staged on a host"),
    pytest.param("cuda", mapped, id="device", marks=ON_GPU),
]
each_kind = pytest.mark.parametrize(("device", "opened"), KINDS)


@pytest.fixture
def arena():
    arena = Arena.create(SLOT_BYTES, SLOTS, name="test")
    yield arena
    arena.close()


def block(pool, index):
    return bytes(pool.block_view(index).tolist())


@each_kind
def test_blocks_go_to_their_slots_and_back(device, opened, arena, small_staging):
    pool = make_pool(device)
    copies = opened(pool, arena.fd, WELCOME)
    sums = copies.to_slots((4, 0, 1, 3, 5), (7, 2, 3, 0, 8))
    for slot, index, made in zip((7, 2, 3, 0, 8), (4, 0, 1, 3, 5), sums, strict=True):
        assert bytes(arena.view(slot)[: GEOMETRY.block_bytes]) == block(pool, index)
        assert made == checksum(block(pool, index))
    kept = [block(pool, index) for index in (4, 0, 1, 3, 5)]
    untouched = block(pool, 2)
    pool.memory[[0, 1, 3, 4, 5]] = 0
    assert copies.from_slots((7, 2, 3, 0, 8), (5, 3, 0, 1, 4), sums) == ()
    assert [block(pool, index) for index in (5, 3, 0, 1, 4)] == kept
    assert block(pool, 2) == untouched
    copies.close()


@each_kind
def test_a_switched_byte_is_found(device, opened, arena, small_staging):
    copies = opened(make_pool(device), arena.fd, WELCOME)
    sums = copies.to_slots((0, 1, 2), (0, 1, 2))
    arena.view(1)[17] ^= 1
    assert copies.from_slots((0, 1, 2), (3, 4, 5), sums) == (1,)
    assert copies.from_slots((0, 1, 2), (3, 4, 5), (sums[0], 0, sums[2])) == (), "none was asked for"
    copies.close()


@each_kind
def test_without_checksums_none_are_made(device, opened, arena, small_staging):
    pool = make_pool(device)
    copies = opened(pool, arena.fd, StoreWelcome(NodeId("n"), SLOT_BYTES, SLOTS, has_checksums=False))
    assert copies.to_slots((0, 1), (0, 1)) == (0, 0)
    assert copies.from_slots((0, 1), (2, 3), (0, 0)) == ()
    assert block(pool, 3) == block(pool, 1)
    copies.close()


def test_what_is_no_such_arena_is_refused(pool, arena):
    wrong = StoreWelcome(NodeId("n"), SLOT_BYTES, SLOTS + 1, has_checksums=True)
    with pytest.raises(ValueError, match="bytes"):
        mapped(pool, arena.fd, wrong)
    small = StoreWelcome(NodeId("n"), GEOMETRY.block_bytes // 2, SLOTS, has_checksums=True)
    with pytest.raises(ValueError, match="blocks of"):
        mapped(pool, arena.fd, small)
    os.fstat(arena.fd)  # still ours


# --- workers of several ranks ----------------------------------------------------------------------


def parts_of(geometry, shape, blocks=None):
    """Pools of a worker's ranks, with their parts of `blocks`."""
    parts = []
    for places in places_of_shape(geometry, shape):
        own = part_geometry(geometry, places)
        pool = KVPool(own, kv_bytes=BLOCKS * own.block_bytes, device=torch.device("cpu"))
        if blocks is not None:
            pool.memory.copy_(torch.from_numpy(cut(blocks, geometry, places)))
        parts.append(PoolPart(*places, pool))
    return parts


def opened_for(kind, parts, geometry, arena, monkeypatch):
    monkeypatch.setattr(store_pool, "STAGING_BYTES", 4 * geometry.block_bytes)  # two blocks at a time
    mine = Arena.attach(os.dup(arena.fd), arena.slot_bytes, arena.slot_count)
    return kind(parts, geometry, mine, has_checksums=True)


@pytest.mark.parametrize("kind", [HostCopies, DeviceCopies])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("writer", SHAPES)
def test_what_one_shape_wrote_every_shape_reads(kind, geometry, writer, monkeypatch):
    blocks = random_blocks(geometry, block_count=BLOCKS)
    arena = Arena.create(slot_bytes_for(geometry.block_bytes), SLOTS, name="test")
    copies = opened_for(kind, parts_of(geometry, writer, blocks), geometry, arena, monkeypatch)
    sums = copies.to_slots((4, 0, 5), (7, 2, 3))
    copies.close()
    for slot, index, made in zip((7, 2, 3), (4, 0, 5), sums, strict=True):
        content = blocks[index].tobytes()
        assert bytes(arena.view(slot)[: geometry.block_bytes]) == content, "as one rank has it"
        assert made == checksum(content)
    for reader in SHAPES:
        parts = parts_of(geometry, reader)
        copies = opened_for(kind, parts, geometry, arena, monkeypatch)
        assert copies.from_slots((7, 2, 3), (1, 4, 0), sums) == ()
        for part in parts:
            expected = cut(blocks[[4, 0, 5]], geometry, Places(part.layers, part.heads))
            assert (part.pool.memory[[1, 4, 0]].numpy() == expected).all()
            assert not part.pool.memory[[2, 3, 5]].any()
        copies.close()
    arena.close()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "1"])
def test_a_byte_switched_in_the_slot_is_found_whichever_part_it_is_in(shape, monkeypatch):
    geometry = GEOMETRIES["int8"]
    blocks = random_blocks(geometry, block_count=BLOCKS)
    arena = Arena.create(slot_bytes_for(geometry.block_bytes), SLOTS, name="test")
    copies = opened_for(HostCopies, parts_of(geometry, shape, blocks), geometry, arena, monkeypatch)
    sums = copies.to_slots((0, 1), (0, 1))
    for at in range(0, geometry.block_bytes, geometry.block_bytes // 16):
        arena.view(1)[at] ^= 1
        assert copies.from_slots((0, 1), (2, 3), sums) == (1,)
        assert copies.from_slots((0, 1), (2, 3), (0, 0)) == (), "none was asked for"
        arena.view(1)[at] ^= 1
    arena.view(1)[geometry.block_bytes] ^= 1  # behind the block's content
    assert copies.from_slots((0, 1), (2, 3), sums) == ()
    copies.close()
    arena.close()


def test_parts_without_checksums_make_none(arena):
    parts = parts_of(GEOMETRIES["grouped"], "tp2", random_blocks(GEOMETRIES["grouped"], block_count=BLOCKS))
    welcome = StoreWelcome(NodeId("n"), SLOT_BYTES, SLOTS, has_checksums=False)
    copies = copies_of(parts, GEOMETRIES["grouped"])(arena.fd, welcome)
    assert copies.to_slots((0, 1), (0, 1)) == (0, 0)
    assert copies.from_slots((0, 1), (2, 3), (0, 0)) == ()
    copies.close()
