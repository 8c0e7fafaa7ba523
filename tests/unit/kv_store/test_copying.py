import ctypes
import random
import sys
import threading

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kv.stream_copy import checked_copies, stream_copies
from kv_store.copying import SLICE_BYTES, BlockCopier, BlockMoves, fastest


def copied(order_from, order_to, block_bytes, *, threads, has_checksums, moves=None):
    """(what arrived, by position; checksums), of blocks with contents of their own."""
    count = len(order_from)
    contents = [bytes([index % 251 + 1]) * (block_bytes - 1) + bytes([index % 7]) for index in range(count)]
    source = ctypes.create_string_buffer(
        b"".join(contents[index] for index in order_from), count * block_bytes
    )
    room = ctypes.create_string_buffer(count * block_bytes + 64)
    skipped = -ctypes.addressof(room) % 64  # blocks at a multiple of 64 are written past the caches
    target = (ctypes.c_char * (count * block_bytes)).from_buffer(room, skipped)
    place_from = {index: at for at, index in enumerate(order_from)}
    sources = [ctypes.addressof(source) + place_from[index] * block_bytes for index in range(count)]
    targets = [ctypes.addressof(target) + order_to[index] * block_bytes for index in range(count)]
    copier = BlockCopier(threads, moves=moves)
    checksums = copier.copy(sources, targets, block_bytes, has_checksums=has_checksums)
    copier.close()
    arrived = target.raw
    return contents, [arrived[at * block_bytes :][:block_bytes] for at in order_to], checksums


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(0, 20), threads=st.integers(1, 3), has_checksums=st.booleans())
def test_every_block_arrives_where_it_should(data, count, threads, has_checksums):
    runs = st.sampled_from([list(range(count)), list(reversed(range(count)))])
    order = st.one_of(runs, st.permutations(list(range(count))))
    block_bytes = data.draw(st.sampled_from([1, 100, 4096]))
    contents, arrived, checksums = copied(
        data.draw(order), data.draw(order), block_bytes, threads=threads, has_checksums=has_checksums
    )
    assert arrived == contents
    assert checksums == ([xxhash.xxh3_64_intdigest(c) for c in contents] if has_checksums else [])


@pytest.mark.parametrize("block_bytes", [SLICE_BYTES // 2, SLICE_BYTES, SLICE_BYTES + 5])
def test_large_blocks_side_by_side(block_bytes):
    order = list(range(5))
    contents, arrived, checksums = copied(order, order, block_bytes, threads=2, has_checksums=True)
    assert arrived == contents
    assert checksums == [xxhash.xxh3_64_intdigest(c) for c in contents]


def test_others_run_while_it_copies():
    """Another thread runs only if the GIL is let go: the switch interval is beyond the test's patience."""
    size = 16 * 2**20
    source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    go, ran, copier = threading.Event(), [], BlockCopier()

    def other():
        go.wait()
        ran.append(True)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        go.set()
        for _ in range(500):
            copier.copy([ctypes.addressof(source)], [ctypes.addressof(target)], size, has_checksums=False)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.fixture(scope="module")
def native():
    """The native library's moves: ([plain], [checked])."""
    plain, checked = stream_copies(), checked_copies()
    if not plain:
        pytest.skip("no compiler for the native library")
    return plain, checked


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 3 * 8192 + 77, SLICE_BYTES // 2, SLICE_BYTES + 5])
def test_streamed_blocks_arrive_as_others_do(block_bytes, native):
    plain, checked = native
    order, targets = [2, 0, 1, 3, 4], [4, 3, 0, 1, 2]
    for move in plain:
        contents, arrived, _ = copied(
            order, targets, block_bytes, threads=2, has_checksums=False, moves=BlockMoves(plain=move)
        )
        assert arrived == contents
    for move in checked:
        contents, arrived, checksums = copied(
            order, targets, block_bytes, threads=2, has_checksums=True, moves=BlockMoves(checked=move)
        )
        assert arrived == contents
        assert checksums == [xxhash.xxh3_64_intdigest(c) for c in contents]


EDGES = [0, 1, 63, 64, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1088, 2048, 4096, 8192, 65_537]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 300), st.integers(0, 40_000))
starts = st.one_of(st.sampled_from([0, 32, 64]), st.integers(0, 100))


@settings(max_examples=150, deadline=None)
@given(to=starts, start=starts, size=sizes)
@example(to=0, start=3, size=241)
@example(to=64, start=0, size=2048)
@example(to=0, start=1, size=65_537)
def test_native_copies_are_of_any_bytes_and_no_others(native, to, start, size):
    """Only targets at a multiple of 64 are written past the caches."""
    plain, checked = native
    source = ctypes.create_string_buffer(random.Random(size).randbytes(start + size), start + size + 1)
    content = source.raw[start : start + size]
    for move in (*plain, *checked):
        target = ctypes.create_string_buffer(b"#" * (to + size + 164), to + size + 164)
        before = to + -ctypes.addressof(target) % 64
        result = move(ctypes.addressof(target) + before, ctypes.addressof(source) + start, size)
        assert target.raw == b"#" * before + content + b"#" * (to + 164 - before)
        assert move in plain or result == xxhash.xxh3_64_intdigest(content)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((10, 9, 1), 2), ((10, 9.5, 9.2), 0), ((10, 20, 30), 0), ((10, 2, 3), 1), ((10,), 0)],
)
def test_another_way_is_taken_where_it_is_clearly_faster(seconds, chosen):
    clock = [0.0]

    def moves_of(number):
        def move(*_):
            clock[0] += seconds[number]

        return move

    moves = [moves_of(number) for number in range(len(seconds))]
    assert fastest(moves, now=lambda: clock[0]) is moves[chosen]


def test_what_is_tried_lies_as_pools_and_arenas_do():
    places = set()
    fastest([lambda to, origin, size: places.add((to % 4096, origin % 4096, size))] * 2)
    assert places == {(0, 0, 2**19)}
