import errno
import os
import resource
import stat
import subprocess
import sys
import threading

import pytest
import xxhash

from baton.core.errors import SetupError
from kv_store.large_pages import LARGE_PAGE_BYTES, PRIVATE, SHARED, address_of
from kv_store.ssd import block_file as block_file_module
from kv_store.ssd import folder as folder_module
from kv_store.ssd.block_file import BlockFile
from kv_store.ssd.errors import CorruptBlock, DiskError, DiskFull
from kv_store.ssd.folder import file_path, files_in
from kv_store.ssd.layout import Title, encode_title, file_bytes, slot_disk_bytes
from tests.unit.kv_store.ssd.block_files import (
    PAGE,
    aligned,
    facts_of,
    open_file,
    payload_of,
    read,
    slot_bytes_of,
    write,
)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("block_bytes", [100, 4096, 4097, 196_608, 3 * 2**20 + 12])
def test_blocks_come_back_as_they_were_after_a_restart(tmp_path, block_bytes, io):
    file, recovered = open_file(tmp_path, block_bytes, io=io)
    assert recovered == []
    checksums = {slot: write(file, slot, index) for slot, index in ((0, 10), (7, 11), (3, 12))}
    assert read(file, 7, 11) == payload_of(11, block_bytes)
    file.close()

    file, recovered = open_file(tmp_path, block_bytes, io=io)
    assert {(r.ssd_slot, r.facts, r.checksum) for r in recovered} == {
        (0, facts_of(10), checksums[0]),
        (7, facts_of(11), checksums[7]),
        (3, facts_of(12), checksums[3]),
    }
    for slot, index in ((0, 10), (7, 11), (3, 12)):
        assert read(file, slot, index) == payload_of(index, block_bytes)
        assert checksums[slot] == xxhash.xxh3_64_intdigest(payload_of(index, block_bytes))
    assert file.io == io
    file.close()


@pytest.mark.parametrize(
    ("large", "block_bytes", "is_staged"),
    [
        ({PRIVATE}, 196_608, True),
        ({PRIVATE, SHARED}, 196_608, False),
        (set(), 196_608, False),
        ({PRIVATE}, 32_768, False),
    ],
)
def test_memory_in_small_pages_goes_by_way_of_a_buffer_in_large_ones(
    tmp_path, monkeypatch, large, block_bytes, is_staged
):
    monkeypatch.setattr(block_file_module, "gives_large_pages", lambda kind: kind in large)
    file, _ = open_file(tmp_path, block_bytes)
    moved = []
    for name in ("read", "write"):
        call = getattr(file._device, name)
        monkeypatch.setattr(
            file._device, name, lambda buffers, at, call=call: (moved.append(buffers[0]), call(buffers, at))
        )
    source, target = aligned(payload_of(1, block_bytes)), aligned(bytes(block_bytes))
    file.write(3, source, facts_of(1))
    file.read(3, target, facts_of(1).block_hash)
    assert bytes(target) == bytes(source)
    straight = [address_of(source), address_of(target)]
    assert ([address_of(one) for one in moved] != straight) == is_staged
    if is_staged:
        assert all(address_of(one) % LARGE_PAGE_BYTES == 0 for one in moved)
    assert any("by way of" in note for note in file.notes) == is_staged
    file.close()


def test_unaligned_and_unpadded_buffers_are_served_too(tmp_path):
    file, _ = open_file(tmp_path, 5000)
    payload = payload_of(1, 5000)
    file.write(0, memoryview(bytearray(b"x" + payload))[1:], facts_of(1))
    into = memoryview(bytearray(5001))[1:]
    file.read(0, into, facts_of(1).block_hash)
    assert bytes(into) == payload
    file.close()


def test_another_block_than_asked_for_is_corrupt(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    write(file, 2, 1)
    for slot, index in ((2, 2), (3, 1)):
        with pytest.raises(CorruptBlock):
            read(file, slot, index)
    file.close()


def test_a_wrong_checksum_given_by_the_writer_makes_a_block_that_is_never_given_out(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    file.write(0, aligned(payload_of(1, PAGE)), facts_of(1), checksum=12345)
    with pytest.raises(CorruptBlock):
        read(file, 0, 1)
    file.close()


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_forgotten_block_is_not_found_again_and_its_disk_space_comes_back(tmp_path, is_flushed):
    block_bytes = 2**20
    file, _ = open_file(tmp_path, block_bytes)
    for slot in range(8):
        write(file, slot, slot)
    taken = files_in(tmp_path)[block_bytes]
    for slot in range(6):
        file.forget(slot)
    if is_flushed:
        file.flush()
        assert files_in(tmp_path)[block_bytes] <= taken - 6 * block_bytes
        with pytest.raises(CorruptBlock):
            read(file, 2, 2)
    file.close()
    file, recovered = open_file(tmp_path, block_bytes)
    assert sorted(r.ssd_slot for r in recovered) == [6, 7]
    assert read(file, 6, 6) == payload_of(6, block_bytes)
    file.close()


def test_a_slot_written_after_it_was_forgotten_keeps_the_new_block(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    for index in range(200):
        write(file, index % 3, index)
        if index < 199:
            file.forget(index % 3)
    file.close()
    file, recovered = open_file(tmp_path, PAGE)
    assert [r.facts for r in recovered] == [facts_of(199)]
    assert read(file, 199 % 3, 199) == payload_of(199, PAGE)
    file.close()


def test_where_a_file_system_has_no_holes_the_label_is_overwritten(tmp_path, monkeypatch):
    def no_holes(*_args):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(block_file_module, "punch_hole", no_holes)
    file, _ = open_file(tmp_path, PAGE)
    write(file, 0, 0)
    write(file, 1, 1)
    file.forget(0)
    file.close()
    file, recovered = open_file(tmp_path, PAGE)
    assert [r.ssd_slot for r in recovered] == [1]
    file.close()


def test_of_a_block_found_twice_the_one_written_later_stays(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    write(file, 5, 1)
    write(file, 2, 1)
    write(file, 0, 2)
    file.close()
    for _ in range(2):  # the other is forgotten for good
        file, recovered = open_file(tmp_path, PAGE)
        assert {(r.ssd_slot, r.facts) for r in recovered} == {(2, facts_of(1)), (0, facts_of(2))}
        file.close()
    file, _ = open_file(tmp_path, PAGE)
    with pytest.raises(CorruptBlock):
        read(file, 5, 1)
    file.close()


def test_blocks_written_after_a_restart_are_newer_than_those_before(tmp_path):
    for slot in (0, 4, 2):
        file, _ = open_file(tmp_path, PAGE)
        write(file, slot, 1)
        file.close()
    file, recovered = open_file(tmp_path, PAGE)
    assert [r.ssd_slot for r in recovered] == [2]
    file.close()


def test_the_file_never_takes_more_disk_than_was_configured(tmp_path):
    block_bytes, disk_bytes = 300_000, 5 * 2**20
    slot_count = (disk_bytes - PAGE) // slot_disk_bytes(slot_bytes_of(block_bytes))
    assert file_bytes(slot_bytes_of(block_bytes), slot_count) <= disk_bytes
    assert file_bytes(slot_bytes_of(block_bytes), slot_count + 1) > disk_bytes
    file, _ = open_file(tmp_path, block_bytes, slot_count)
    for _ in range(2):
        for slot in range(slot_count):
            write(file, slot, slot)
        file.flush()
        assert files_in(tmp_path)[block_bytes] <= disk_bytes
    file.close()


def test_in_a_smaller_file_what_lies_beyond_is_gone(tmp_path):
    file, _ = open_file(tmp_path, PAGE, 8)
    for slot in range(8):
        write(file, slot, slot)
    file.close()
    for count, kept in ((3, 3), (100, 3)):
        file, recovered = open_file(tmp_path, PAGE, count)
        assert len(recovered) == kept
        file.close()


def full_at(limit):
    """Sets the largest size a file may grow to; the kernel then fails writes with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path):
    file, _ = open_file(tmp_path, 65_536)
    write(file, 0, 0)
    write(file, 3, 33)
    try:
        full_at(3 * 69_632 + PAGE + 8192)  # in the midst of slot 3
        with pytest.raises(DiskFull):
            write(file, 3, 3)
        with pytest.raises(DiskFull):
            write(file, 4, 4)
        write(file, 1, 1)
    finally:
        full_at(resource.RLIM_INFINITY)
    file.close()
    file, recovered = open_file(tmp_path, 65_536)
    assert sorted(r.ssd_slot for r in recovered) == [0, 1]
    assert read(file, 1, 1) == payload_of(1, 65_536)
    file.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_errors_of_the_device_keep_their_kind(tmp_path, monkeypatch, number):
    file, _ = open_file(tmp_path, PAGE)
    write(file, 0, 0)

    def fail(*_args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        patch.setattr(os, "preadv", fail)
        with pytest.raises(DiskError) as caught:
            write(file, 1, 1)
        assert isinstance(caught.value, DiskFull) == (number != errno.EIO)
        with pytest.raises(DiskError) as caught:
            read(file, 0, 0)
        assert not isinstance(caught.value, CorruptBlock)
    assert read(file, 0, 0) == payload_of(0, PAGE)
    file.close()


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    real_write, real_read = os.pwritev, os.preadv

    def one_page(call):
        return lambda fd, buffers, offset, flags=0: call(fd, [memoryview(buffers[0])[:PAGE]], offset, flags)

    monkeypatch.setattr(os, "pwritev", one_page(real_write))
    monkeypatch.setattr(os, "preadv", one_page(real_read))
    file, _ = open_file(tmp_path, 5 * PAGE)
    write(file, 1, 1)
    assert read(file, 1, 1) == payload_of(1, 5 * PAGE)
    file.close()


def test_two_processes_never_share_a_folder(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    other, _ = open_file(tmp_path, 2 * PAGE)  # another size class of the same node is welcome
    file.close()
    code = (
        "import sys\nfrom kv_store.ssd.block_file import BlockFile\n"
        "from baton.core.errors import SetupError\n"
        "try:\n    BlockFile.open(sys.argv[1], block_bytes=4096, slot_bytes=4096, slot_count=8)\n"
        "except SetupError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd()).stdout
    assert f"pid {os.getpid()}" in said
    other.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_files_that_are_not_ours_are_refused_and_stay_as_they_are(tmp_path):
    path = file_path(tmp_path, PAGE)
    for content, words in (
        (b"a letter to my aunt", "not a file of a Baton store"),
        (b"", "not a file of a Baton store"),
        (encode_title(Title(b"i" * 16, PAGE, PAGE, version=99)), "format 99"),
        (encode_title(Title(b"i" * 16, 2 * PAGE, 2 * PAGE)), "blocks of 8192 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(SetupError, match=words):
            open_file(tmp_path, PAGE)
        assert path.read_bytes() == content


def test_slots_of_another_file_are_not_recovered(tmp_path):
    for name in ("a", "b"):
        file, _ = open_file(tmp_path / name, PAGE)
        write(file, 1, 1)
        file.close()
    pages = file_path(tmp_path / "a", PAGE).read_bytes()
    with file_path(tmp_path / "b", PAGE).open("r+b") as file:
        file.seek(PAGE)
        file.write(pages[PAGE:])
    file, recovered = open_file(tmp_path / "b", PAGE)
    assert recovered == []
    file.close()


def test_a_folder_that_cannot_be_made_is_a_setup_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"store\.ssd_dir"):
        open_file(tmp_path / "file" / "folder", PAGE)


def test_without_direct_io_it_is_buffered_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "supports_direct", lambda _path: False)
    file, _ = open_file(tmp_path, PAGE, io="direct")
    assert file.io == "buffered"
    assert any("no direct IO" in note for note in file.notes)
    file.close()


def test_auto_measures_both_says_what_it_chose_and_leaves_nothing(tmp_path):
    file, _ = open_file(tmp_path, 65_536, io="auto")
    assert any(f"{file.io} IO" in note and "GB/s" in note for note in file.notes)
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks-65536.kv", "lock"]


def test_a_tenant_name_too_long_for_a_label_is_refused_and_nothing_stored(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    with pytest.raises(DiskError):
        file.write(0, aligned(payload_of(0, PAGE)), facts_of(0, tenant="t" * 5000))
    file.close()
    file, recovered = open_file(tmp_path, PAGE)
    assert recovered == []
    file.close()


def test_threads_work_on_different_slots_at_once(tmp_path):
    file, _ = open_file(tmp_path, 20_000, slot_count=64)
    failures = []

    def loop(first):
        for turn in range(10):
            for slot in range(first, 64, 4):
                write(file, slot, slot + 100 * turn)
                if read(file, slot, slot + 100 * turn) != payload_of(slot + 100 * turn, 20_000):
                    failures.append(slot)

    threads = [threading.Thread(target=loop, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert failures == []
    file, recovered = open_file(tmp_path, 20_000, slot_count=64)
    assert {r.facts for r in recovered} == {facts_of(slot + 900) for slot in range(64)}
    file.close()


def test_after_close_every_call_is_refused(tmp_path):
    file, _ = open_file(tmp_path, PAGE)
    file.close()
    file.close()
    for call in (lambda: write(file, 0, 0), lambda: read(file, 0, 0), file.flush):
        with pytest.raises(DiskError, match="closed"):
            call()


def test_recovery_tells_its_progress_and_finds_blocks_among_many_empty_slots(tmp_path):
    file, _ = open_file(tmp_path, PAGE, slot_count=200_000)
    for slot in (0, 511, 512, 70_000, 199_999):
        write(file, slot, slot)
    file.close()
    seen = []
    file, recovered = open_file(tmp_path, PAGE, slot_count=200_000, progress=lambda *at: seen.append(at))
    assert sorted(r.ssd_slot for r in recovered) == [0, 511, 512, 70_000, 199_999]
    assert max(seen) == (200_000, 200_000)
    assert len(seen) < 1000
    file.close()


def test_only_the_owner_may_read_the_file(tmp_path):
    before = os.umask(0o000)
    try:
        file, _ = BlockFile.open(tmp_path, block_bytes=4096, slot_bytes=4096, slot_count=2, io="buffered")
    finally:
        os.umask(before)
    file.close()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
