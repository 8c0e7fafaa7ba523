import ctypes
import sys
import threading

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.stream_copy import stream_copy
from kv_store.copying import SLICE_BYTES, BlockCopier, is_faster


def copied(order_from, order_to, block_bytes, *, threads, has_checksums, stream=None):
    """(what arrived, by position; checksums), of blocks with contents of their own."""
    count = len(order_from)
    contents = [bytes([index % 251 + 1]) * (block_bytes - 1) + bytes([index % 7]) for index in range(count)]
    source = ctypes.create_string_buffer(
        b"".join(contents[index] for index in order_from), count * block_bytes
    )
    target = ctypes.create_string_buffer(count * block_bytes)
    place_from = {index: at for at, index in enumerate(order_from)}
    sources = [ctypes.addressof(source) + place_from[index] * block_bytes for index in range(count)]
    targets = [ctypes.addressof(target) + order_to[index] * block_bytes for index in range(count)]
    copier = BlockCopier(threads, stream=stream)
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


@pytest.mark.parametrize("block_bytes", [1, 100, 4096, 3 * 8192 + 77, SLICE_BYTES // 2, SLICE_BYTES + 5])
@pytest.mark.parametrize("has_checksums", [False, True])
def test_streamed_blocks_arrive_as_others_do(block_bytes, has_checksums):
    stream = stream_copy()
    if stream is None:
        pytest.skip("no compiler for the native library")
    order, targets = [2, 0, 1, 3, 4], [4, 3, 0, 1, 2]
    contents, arrived, checksums = copied(
        order, targets, block_bytes, threads=2, has_checksums=has_checksums, stream=stream
    )
    assert arrived == contents
    assert checksums == ([xxhash.xxh3_64_intdigest(c) for c in contents] if has_checksums else [])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 40_000))
def test_a_stream_copies_any_bytes_and_no_others(to, start, size):
    stream = stream_copy()
    if stream is None:
        pytest.skip("no compiler for the native library")
    source = ctypes.create_string_buffer(bytes(i * 31 % 251 for i in range(start + size)), start + size + 1)
    target = ctypes.create_string_buffer(b"#" * (to + size + 100), to + size + 100)
    stream(ctypes.addressof(target) + to, ctypes.addressof(source) + start, size)
    assert target.raw == b"#" * to + source.raw[start : start + size] + b"#" * 100


@pytest.mark.parametrize(("stream_s", "is_chosen"), [(0.001, True), (0.0095, False), (0.02, False)])
def test_a_stream_is_used_where_it_is_clearly_faster(stream_s, is_chosen):
    clock = [0.0]
    streamed = []

    def now():
        clock[0] += 0.01 - streamed.count(1) * (0.01 - stream_s) / 64
        streamed.clear()
        return clock[0]

    assert is_faster(lambda *_: streamed.append(1), now=now) is is_chosen
