"""Messages of the store in MessagePack and back.

Each codec is for one closed union, and lets through only block hashes of the right size.
"""

from typing import Any, Generic, TypeVar

import msgspec

from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash
from baton.core.store import (
    BlockFacts,
    BlocksGrant,
    BlocksReleased,
    BlocksRequest,
    EndLoad,
    FindBlocks,
    LoadBlocks,
    NodeToNode,
    OfferBlocks,
    StoreHello,
    StoreToWorker,
    TakeOver,
    WorkerToStore,
)
from baton.core.store_admin import StoreReply, StoreRequest
from baton.wire.decoding import WireError

T = TypeVar("T")

Opening = StoreHello | StoreRequest
"""The messages that may come first on a local connection."""


class Codec(Generic[T]):
    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, payload: bytes) -> T:
        """Read a message. Raises WireError if it is none of the union, or has no proper block hash."""
        try:
            message = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed message: {error}") from None
        if any(len(block_hash) != HASH_BYTES for block_hash in _hashes_of(message)):
            raise WireError(f"{type(message).__name__} names a block by something that is no block hash")
        return message


def _hashes_of(message: object) -> list[BlockHash]:
    match message:
        case OfferBlocks() as offer:
            return _named_by(offer.blocks)
        case BlocksGrant() as pinned:
            return _named_by(pinned.facts)
        case FindBlocks() | LoadBlocks() | BlocksRequest() | TakeOver():
            return list(message.hashes)
        case EndLoad() | BlocksReleased():
            return list(message.corrupt)
        case _:
            return []


def _named_by(blocks: tuple[BlockFacts, ...]) -> list[BlockHash]:
    return [each for block in blocks for each in (block.block_hash, block.parent)]


FROM_WORKER: Codec[WorkerToStore] = Codec(WorkerToStore)
FROM_STORE: Codec[StoreToWorker] = Codec(StoreToWorker)
BETWEEN_NODES: Codec[NodeToNode] = Codec(NodeToNode)
OPENING: Codec[Opening] = Codec(Opening)
REQUEST: Codec[StoreRequest] = Codec(StoreRequest)
REPLY: Codec[StoreReply] = Codec(StoreReply)
