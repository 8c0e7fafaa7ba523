"""The layout of a size class's file, byte by byte. Pure.

A page is 4096 bytes. The file begins with its title page; then slots follow, each of `slot_bytes` of payload
and one label page. The label comes last, so that a process that dies while it writes leaves no label without
its payload. All numbers are little endian:

    title   magic 8s, version u32, zero u32, file id 16s, block bytes u64, slot bytes u64, …0, XXH3-64 of all
            before
    label   magic 8s, version u32, facts length u32, file id 16s, slot u64, sequence u64, payload bytes u64,
            XXH3-64 of the payload u64, facts (MessagePack), …0, XXH3-64 of all before
"""

import struct
from dataclasses import dataclass

import msgspec

from baton.core.store import BlockFacts
from kv_store.checksum import checksum

PAGE_BYTES = 4096
VERSION = 1
FILE_ID_BYTES = 16

_TITLE_MAGIC, _LABEL_MAGIC = b"BatonKVF", b"BatonBlk"
_TITLE = struct.Struct("<8sII16sQQ")
_LABEL = struct.Struct("<8sII16sQQQQ")
_SUM = struct.Struct("<Q")
_SUM_AT = PAGE_BYTES - _SUM.size
FACTS_BYTES_MAX = _SUM_AT - _LABEL.size

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlockFacts)


@dataclass(frozen=True, slots=True)
class Title:
    file_id: bytes
    block_bytes: int
    slot_bytes: int
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Label:
    slot: int
    sequence: int
    """The number of the write to the file, which rises with every one."""
    payload_bytes: int
    payload_checksum: int
    facts: BlockFacts


def slot_disk_bytes(slot_bytes: int) -> int:
    """The disk space of one slot, its label included."""
    return slot_bytes + PAGE_BYTES


def file_bytes(slot_bytes: int, slot_count: int) -> int:
    return PAGE_BYTES + slot_count * slot_disk_bytes(slot_bytes)


def payload_offset(slot: int, slot_bytes: int) -> int:
    return PAGE_BYTES + slot * slot_disk_bytes(slot_bytes)


def label_offset(slot: int, slot_bytes: int) -> int:
    return payload_offset(slot, slot_bytes) + slot_bytes


def encode_title(title: Title) -> bytes:
    return _with_checksum(
        _TITLE.pack(_TITLE_MAGIC, title.version, 0, title.file_id, title.block_bytes, title.slot_bytes)
    )


def decode_title(page: bytes | bytearray | memoryview) -> Title | None:
    """The title, or None for a file that is not ours or is damaged. Only `version` means anything in a file
    of another version."""
    if len(page) < PAGE_BYTES or not _has_checksum(page):
        return None
    magic, version, _, file_id, block_bytes, slot_bytes = _TITLE.unpack_from(page)
    return Title(file_id, block_bytes, slot_bytes, version) if magic == _TITLE_MAGIC else None


def encode_label(label: Label, file_id: bytes) -> bytes:
    """Encode a label. Raises ValueError if the facts are too long for a page (a tenant's name, most
    likely)."""
    facts = _encoder.encode(label.facts)
    if len(facts) > FACTS_BYTES_MAX:
        raise ValueError(f"the facts of a block take {len(facts)} bytes, {FACTS_BYTES_MAX} at most")
    fields = (label.slot, label.sequence, label.payload_bytes, label.payload_checksum)
    return _with_checksum(_LABEL.pack(_LABEL_MAGIC, VERSION, len(facts), file_id, *fields) + facts)


def decode_label(page: bytes | bytearray | memoryview, *, file_id: bytes, slot: int) -> Label | None:
    """The label; None unless it was written whole, by this file, for this slot."""
    if len(page) < PAGE_BYTES or bytes(page[: len(_LABEL_MAGIC)]) != _LABEL_MAGIC or not _has_checksum(page):
        return None
    _, version, facts_bytes, owner, written_slot, *numbers = _LABEL.unpack_from(page)
    if (version, owner, written_slot) != (VERSION, file_id, slot) or facts_bytes > FACTS_BYTES_MAX:
        return None
    try:
        facts = _decoder.decode(page[_LABEL.size : _LABEL.size + facts_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    sequence, payload_bytes, payload_checksum = numbers
    return Label(slot, sequence, payload_bytes, payload_checksum, facts)


def _with_checksum(content: bytes) -> bytes:
    page = content.ljust(_SUM_AT, b"\0")
    return page + _SUM.pack(checksum(page))


def _has_checksum(page: bytes | bytearray | memoryview) -> bool:
    (expected,) = _SUM.unpack_from(page, _SUM_AT)
    return checksum(memoryview(page)[:_SUM_AT]) == expected
