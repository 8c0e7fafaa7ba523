import fcntl
import mmap
import os
import socket
import subprocess
import sys

import pytest

from baton.core.errors import SetupError
from kv_store import arena as arena_module
from kv_store.arena import Arena, NoHostMemory, slot_bytes_for
from kv_store.host_memory import available_bytes, own_cgroups

SLOT = 16 * mmap.PAGESIZE


@pytest.fixture
def arena():
    made = Arena.create(SLOT, 64, name="test")
    yield made
    made.close()


def test_slots_are_apart_aligned_and_writable(arena):
    for slot in range(64):
        arena.view(slot)[:] = bytes([slot]) * SLOT
    assert all(bytes(arena.view(slot)) == bytes([slot]) * SLOT for slot in range(64))
    assert arena.address(3) == arena.base_address + 3 * SLOT
    assert arena.address(0) % mmap.PAGESIZE == 0
    assert slot_bytes_for(SLOT - 1) == slot_bytes_for(SLOT) == SLOT


def test_it_takes_memory_as_it_is_used_and_gives_it_back(arena):
    assert arena.resident_bytes() == 0
    arena.reserve(10, 4)
    arena.reserve(12, 4)  # two of them again
    assert arena.resident_bytes() == 6 * SLOT
    arena.view(11)[:5] = b"hello"
    arena.release(11)
    assert arena.resident_bytes() == 5 * SLOT
    assert bytes(arena.view(11)[:5]) == bytes(5)
    arena.reserve(11)
    while arena.reserve_slab():
        pass
    assert arena.resident_bytes() == 64 * SLOT
    for slot in range(64):
        arena.release(slot)
    assert arena.resident_bytes() == 0


def test_reserving_keeps_what_is_there(arena):
    arena.reserve(5)
    arena.view(5)[:] = b"x" * SLOT
    arena.reserve(0, 64)
    assert bytes(arena.view(5)) == b"x" * SLOT


def test_more_than_the_machine_has_is_a_setup_error_before_anything_is_taken(monkeypatch):
    with pytest.raises(SetupError, match=r"store\.host_bytes"):
        Arena.create(SLOT, 2**40 // SLOT, name="test")
    monkeypatch.setattr(arena_module, "available_bytes", lambda: 10 * SLOT)
    with pytest.raises(SetupError):
        Arena.create(SLOT, 11, name="test")
    sparse = Arena.create(SLOT, 11, name="test", room_bytes=5 * SLOT)
    sparse.close()


def test_memory_that_is_gone_later_is_an_error_and_no_signal(monkeypatch):
    arena = Arena.create(SLOT, 64, name="test")
    monkeypatch.setattr(arena_module, "available_bytes", lambda: 3 * SLOT)
    arena.reserve(0, 2)
    arena.reserve(2)
    with pytest.raises(NoHostMemory):
        arena.reserve(3, 61)
    assert arena.resident_bytes() == 3 * SLOT
    arena.close()


ATTACH = """
import array, socket, sys
from kv_store.arena import Arena
link = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(link, 1, 1)
arena = Arena.attach(fds[0], int(sys.argv[2]), int(sys.argv[3]))
mapped = list(arena.map_slabs())
assert bytes(arena.view(3)[:5]) == b"hello", bytes(arena.view(3)[:5])
arena.view(4)[:5] = b"reply"
assert not list(arena.map_slabs(mapped[-1]))
print(mapped[-1], arena.resident_bytes())
arena.close()
"""


def attach_elsewhere(arena, slot_bytes, slot_count):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", ATTACH, str(theirs.fileno()), str(slot_bytes), str(slot_count)]
        socket.send_fds(ours, [b"a"], [arena.fd])
        return subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True)


def test_another_process_shares_it_and_maps_only_what_has_memory(arena):
    arena.reserve(3, 2)
    arena.view(3)[:5] = b"hello"
    done = attach_elsewhere(arena, SLOT, 64)
    assert done.stdout.split() == [str(5 * SLOT), str(2 * SLOT)], done.stderr
    assert bytes(arena.view(4)[:5]) == b"reply"
    assert "SetupError" in attach_elsewhere(arena, SLOT, 65).stderr


@pytest.mark.parametrize(("slot_bytes", "count"), [(SLOT, 63), (SLOT + 1, 64), (0, 64), (SLOT, 0)])
def test_what_does_not_fit_the_descriptor_is_refused_and_closed(arena, slot_bytes, count):
    fd = os.dup(arena.fd)
    with pytest.raises(SetupError, match="arena"):
        Arena.attach(fd, slot_bytes, count)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_nobody_can_take_pages_away_from_under_the_others(arena):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, SLOT)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert not os.get_inheritable(arena.fd)


def test_close_is_safe_twice_and_with_a_view_in_use():
    arena = Arena.create(SLOT, 4, name="test")
    view = arena.view(1)
    view[:3] = b"abc"
    arena.close()
    arena.close()
    assert bytes(view[:3]) == b"abc"


def test_limits_of_control_groups_count(tmp_path, monkeypatch):
    group = tmp_path / "memory" / "outer" / "inner"
    group.mkdir(parents=True)
    for folder, limit, used in ((group, 2**63 - 4096, 0), (group.parent, 9 * 2**20, 5 * 2**20)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("cache 0\ntotal_inactive_file 1048576\n")
    groups = own_cgroups("4:memory:/outer/inner\n7:cpu:/x\n", tmp_path)
    assert groups[:2] == [group, group.parent]
    monkeypatch.setattr("kv_store.host_memory.own_cgroups", lambda: groups)
    assert available_bytes() == 5 * 2**20

    unified = tmp_path / "pod"
    unified.mkdir()
    (unified / "memory.max").write_text("max\n")
    (unified / "memory.current").write_text("7\n")
    (unified / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr("kv_store.host_memory.own_cgroups", lambda: own_cgroups("0::/pod\n", tmp_path))
    assert available_bytes() > 5 * 2**20
    (unified / "memory.max").write_text("1000\n")
    assert available_bytes() == 993
