"""Whatever a crash, a power cut or a failing disk leaves of a slot: the exact block, or nothing."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_store.ssd.errors import CorruptBlock
from kv_store.ssd.folder import file_path
from kv_store.ssd.layout import PAGE_BYTES, payload_offset
from tests.unit.kv_store.ssd.block_files import facts_of, open_file, payload_of, read, slot_bytes_of, write

SPACE = 9000
SLOT_BYTES = slot_bytes_of(SPACE)
AGGREGATED = SLOT_BYTES + PAGE_BYTES
SECTOR = 512


def slot_image(path, slot):
    with path.open("rb") as file:
        file.seek(payload_offset(slot, SLOT_BYTES))
        return file.read(AGGREGATED)


def put(path, slot, image):
    with path.open("r+b") as file:
        file.seek(payload_offset(slot, SLOT_BYTES))
        file.write(image)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """What a slot holds: never written, an older block, a newer block."""
    directory = tmp_path_factory.mktemp("images")
    file, _ = open_file(directory, SPACE, 2)
    path = file_path(directory, SPACE)
    found = [bytes(AGGREGATED)]
    for index in (1, 2):
        write(file, 0, index)
        file.flush()
        found.append(slot_image(path, 0))
    file.close()
    return directory, path, found


damages = st.lists(
    st.tuples(
        st.sampled_from(["zero", "flip", "noise", "cut"]),
        st.integers(0, AGGREGATED - 1),
        st.integers(1, AGGREGATED),
        st.integers(0, 255),
    ),
    max_size=3,
)


def damaged(image, damage):
    kind, start, length, value = damage
    end = min(AGGREGATED, start + length)
    if kind == "flip":
        return image[:start] + bytes([image[start] ^ (value or 1)]) + image[start + 1 :]
    filler = bytes([value]) if kind == "noise" else b"\0"
    end = AGGREGATED if kind == "cut" else end
    return image[:start] + filler * (end - start) + image[end:]


def outcome(directory, index):
    """What a restarted node can get: the payload of block `index` out of slot 0, or None."""
    file, recovered = open_file(directory, SPACE, 2)
    try:
        listed = [r for r in recovered if r.ssd_slot == 0]
        assert all(r.facts in (facts_of(1), facts_of(2)) for r in listed)
        try:
            return read(file, 0, index), facts_of(index) in [r.facts for r in listed]
        except CorruptBlock:
            return None, False
    finally:
        file.close()


def check_exact_or_nothing(directory, path, image):
    put(path, 0, image)
    for index in (1, 2):
        payload, is_listed = outcome(directory, index)
        if payload is not None:
            assert payload == payload_of(index, SPACE)
            assert is_listed


in_place = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@in_place
@given(arrived=st.integers(0, 2 ** (AGGREGATED // SECTOR) - 1), base=st.sampled_from([0, 1]))
def test_any_part_of_the_sectors_of_a_write_arrived(images, arrived, base):
    """A power cut: the device has written some sectors of the new block over what was there, in any order."""
    directory, path, found = images
    image = b"".join(
        found[2 if arrived >> sector & 1 else base][sector * SECTOR : (sector + 1) * SECTOR]
        for sector in range(AGGREGATED // SECTOR)
    )
    check_exact_or_nothing(directory, path, image)


@in_place
@given(damages=damages, base=st.sampled_from([1, 2]))
def test_any_bytes_are_cut_zeroed_flipped_or_noise(images, damages, base):
    directory, path, found = images
    image = found[base]
    for damage in damages:
        image = damaged(image, damage)
    check_exact_or_nothing(directory, path, image)
    if not damages:
        assert outcome(directory, base) == (payload_of(base, SPACE), True)


def test_old_label_with_new_payload_and_the_reverse(images):
    directory, path, (_, old, new) = images
    for image in (new[:SLOT_BYTES] + old[SLOT_BYTES:], old[:SLOT_BYTES] + new[SLOT_BYTES:]):
        put(path, 0, image)
        assert [outcome(directory, index)[0] for index in (1, 2)] == [None, None]


def test_a_slot_copied_elsewhere_is_no_block(images):
    directory, path, (_, old, _) = images
    put(path, 1, old)
    put(path, 0, bytes(AGGREGATED))
    file, recovered = open_file(directory, SPACE, 2)
    file.close()
    assert recovered == []


def test_a_file_cut_short_loses_what_was_cut_and_no_more(images):
    directory, path, (_, old, _) = images
    put(path, 0, old)
    for size in (payload_offset(1, SLOT_BYTES), payload_offset(0, SLOT_BYTES) + 100, PAGE_BYTES):
        os.truncate(path, size)
        is_whole = size >= payload_offset(1, SLOT_BYTES)
        assert outcome(directory, 1)[0] == (payload_of(1, SPACE) if is_whole else None)


WRITER = """
import os, signal, sys
from kv_store.ssd import device
from tests.unit.kv_store.ssd.block_files import open_file, write

directory, io, calls_before, pages_before = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
real, count = os.pwritev, 0

def dying(fd, buffers, offset, flags=0):
    global count
    count += 1
    if count > calls_before:
        whole = b"".join(buffers)[: pages_before * 4096]
        view = memoryview(__import__("mmap").mmap(-1, max(4096, len(whole))))
        view[: len(whole)] = whole
        if whole:
            real(fd, [view[: len(whole)]], offset, flags)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, buffers, offset, flags)

file, recovered = open_file(directory, 9000, io=io)
os.pwritev = dying
for index in range(100):
    write(file, index % 8, index)
"""


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("pages", [0, 1, 2, 3, 4])
def test_killed_while_writing(tmp_path, io, pages):
    """kill -9 after `pages` of the 4 pages of a write: that block is there if all are; the others stay."""
    calls = 10
    command = [sys.executable, "-c", WRITER, str(tmp_path), io, str(calls), str(pages)]
    assert subprocess.run(command, cwd=os.getcwd()).returncode == -signal.SIGKILL
    file, recovered = open_file(tmp_path, SPACE)
    held = {r.ssd_slot: r.facts.depth for r in recovered}
    written = {index % 8: index for index in range(calls)}  # slot 2 held block 2; block 10 was on its way
    before = written.pop(10 % 8)
    in_slot = {0: before, 4: 10}.get(pages, before)
    assert held.pop(2) == in_slot  # the label is written last: it is still the old one
    assert held == written
    for slot, index in written.items():
        assert read(file, slot, index) == payload_of(index, SPACE)
    for index in (before, 10):
        is_whole = (pages == 0 and index == before) or (pages == 4 and index == 10)
        if is_whole:
            assert read(file, 2, index) == payload_of(index, SPACE)
        else:
            with pytest.raises(CorruptBlock):
                read(file, 2, index)
    file.close()
