"""A file of a few blocks, and what was written into it."""

import hashlib
import mmap

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.ssd.block_file import BlockFile

PAGE = 4096


def facts_of(index, tenant="tenant"):
    block_hash = BlockHash(hashlib.sha256(b"%d" % index).digest())
    parent = BlockHash(hashlib.sha256(b"%d" % (index - 1)).digest())
    return BlockFacts(block_hash, parent, index, recompute_s=0.25, tenant=tenant, is_generated=index % 2 == 1)


def payload_of(index, size):
    return hashlib.shake_128(b"payload %d" % index).digest(size)


def slot_bytes_of(block_bytes):
    return -(-block_bytes // PAGE) * PAGE


def aligned(payload):
    """A whole slot at a page's address, as the arena has it."""
    view = memoryview(mmap.mmap(-1, slot_bytes_of(len(payload))))
    view[: len(payload)] = payload
    return view


def open_file(directory, block_bytes, slot_count=8, io="direct", **options):
    return BlockFile.open(
        directory,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes_of(block_bytes),
        slot_count=slot_count,
        io=io,
        **options,
    )


def write(file, slot, index):
    return file.write(slot, aligned(payload_of(index, file.block_bytes)), facts_of(index))


def read(file, slot, index):
    """The payload's bytes. Raises CorruptBlock."""
    view = memoryview(mmap.mmap(-1, file.slot_bytes))
    file.read(slot, view, facts_of(index).block_hash)
    return bytes(view[: file.block_bytes])
