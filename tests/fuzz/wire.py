"""Messages between processes, and what lies on disk in the same formats: protobuf, the store's MessagePack,
labels of the SSD tier, offers of the TCP backend, parts of blocks, and the dashboard's sessions."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.harness import Fuzzer, check_message, main

PACKAGES = (
    *("baton.wire", "kv_store.ssd", "kv_transfer.backends.tcp", "kv_transfer.part_transfer"),
    "control_plane.dashboard.session_file",
)
WORDS = (b"\x00" * 8, b"\xff" * 9 + b"\x01", b"\x80" * 10, b"BatonBlk", b"BatonKVF", b"\xdd\xff\xff\xff\xff")


def load() -> Fuzzer:
    from baton.core.errors import IncompatiblePeer
    from baton.wire import store_codec
    from baton.wire.decoding import WireError
    from control_plane.dashboard.session_file import SessionFile
    from kv_store.ssd.layout import PAGE_BYTES, decode_label, decode_title
    from kv_transfer.backends.tcp import parse_offer

    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-")) / "sessions.json"

    def sessions(content: bytes) -> None:
        path.write_bytes(content)
        SessionFile(path).read()

    def page(content: bytes) -> None:
        whole = content.ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES]
        sound = _with_checksum(whole)  # most damage would stop at the checksum otherwise
        decode_title(sound)
        decode_label(sound, file_id=sound[16:32], slot=int.from_bytes(sound[32:40], "little"))

    codecs = (
        *(store_codec.FROM_WORKER, store_codec.FROM_STORE, store_codec.BETWEEN_NODES),
        *(store_codec.OPENING, store_codec.REQUEST, store_codec.REPLY),
    )
    readers: list[Callable[[bytes], object]] = [codec.decode for codec in codecs]
    readers += [lambda content: parse_offer(content, block_bytes=4096), sessions, page]
    readers += [*_protobuf_readers(), _parts_reader()]

    def check(content: bytes) -> None:
        """The first byte chooses the reader."""
        read = readers[(content[0] if content else 0) % len(readers)]
        try:
            read(content[1:])
        except (WireError, IncompatiblePeer) as error:
            check_message(error)

    return Fuzzer("wire", check, WORDS)


def _parts_reader() -> Callable[[bytes], object]:
    """Parts of a KV owner's blocks, which a reader computes with before it has read a byte."""
    from google.protobuf.message import DecodeError

    from baton.core.geometry import KVGeometry
    from baton.wire.proto import baton_pb2 as pb
    from baton.wire.proto import mapping
    from kv_transfer.part_plan import places_of

    whole = KVGeometry(layer_count=4, kv_head_count=4, head_dim=8, block_tokens=16, dtype="bfloat16")

    def read(content: bytes) -> None:
        try:
            parsed = pb.PeerHello.FromString(content)
        except DecodeError:
            return
        places_of(whole, mapping.peer_hello_from_pb(parsed).parts)

    return read


def _protobuf_readers() -> list[Callable[[bytes], object]]:
    from google.protobuf.message import DecodeError

    from baton.wire.proto import baton_pb2 as pb
    from baton.wire.proto import mapping

    def reader(name: str) -> Callable[[bytes], object]:
        message, convert = getattr(pb, name), getattr(mapping, f"{_snake(name)}_from_pb")

        def read(content: bytes) -> None:
            try:
                parsed = message.FromString(content)
            except DecodeError:
                return
            convert(parsed)

        return read

    names = sorted(pb.DESCRIPTOR.message_types_by_name)
    return [reader(name) for name in names if hasattr(mapping, f"{_snake(name)}_from_pb")]


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


def _with_checksum(page: bytes) -> bytes:
    from kv_store.checksum import checksum

    return page[:-8] + checksum(page[:-8]).to_bytes(8, "little")


if __name__ == "__main__":
    main(load, PACKAGES)
