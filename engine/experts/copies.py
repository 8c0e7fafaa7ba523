"""Experts that one rank copies from another's memory, over a connection of its own to the other's far door.

What travels is the image of the packed weights, so that both ranks compute with the same bits. A copy is
bounded in bytes per second and in time. Whatever goes wrong, the expert is read from the model's files.
"""

import socket
import zlib
from time import monotonic, sleep

import msgspec
import torch
from torch import Tensor

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from baton.wire import peer_sockets
from baton.wire.address import split_address
from engine.experts.far_links import SEND_S, receive_into, receive_message, send_message, watch_for_loss
from engine.experts.hello import CONNECT_S, LinkAnswer, LinkHello
from engine.kernels.movable import IMAGE_ALIGN

CHUNK_BYTES = 2**18
COPIES_MAX = 4
"""Copies that a rank sends at one time. More are refused, and read files."""
SLACK_S, SLACK_TIMES = 5.0, 4.0
"""A copy may take so much longer than its limit of bytes per second asks for."""


def new_image(byte_count: int) -> Tensor:
    """Memory for an image: uint8 [byte_count], aligned."""
    room = torch.zeros(byte_count + IMAGE_ALIGN, dtype=torch.uint8)
    start = -room.data_ptr() % IMAGE_ALIGN
    return room[start : start + byte_count]


def send_image(made: socket.socket, image: Tensor) -> None:
    """Send the image that was asked for, and its checksum. Raises OSError."""
    view = image.numpy().data
    answer = LinkAnswer(byte_count=len(view), checksum=zlib.crc32(view))
    send_message(made, msgspec.json.encode(answer))
    made.settimeout(SEND_S)
    for start in range(0, len(view), CHUNK_BYTES):
        made.sendall(view[start : start + CHUNK_BYTES])


def fetch_image(
    ref: ExpertRankRef, expert: int, kind: str, byte_count: int, *, bytes_per_s: float, caller: str
) -> Tensor:
    """Return the image of an expert that a rank holds. kind: of image that this process can use. Raises
    PeerFailure."""
    what = f"expert {expert} of {ref.rank_id}"
    ends_s = monotonic() + SLACK_S + SLACK_TIMES * byte_count / bytes_per_s
    made: socket.socket | None = None
    try:
        host, port = split_address(ref.address)
        made = peer_sockets.connect(host, port, timeout_s=CONNECT_S)
        watch_for_loss(made)
        hello = LinkHello(ref.secret, caller, 0, 0, 0, 0, 0, expert=expert, image_kind=kind)
        send_message(made, msgspec.json.encode(hello))
        answer = msgspec.json.decode(receive_message(made, timeout_s=CONNECT_S), type=LinkAnswer)
        if answer.refusal or answer.byte_count != byte_count:
            raise PeerFailure(f"{what} is not copied: {answer.refusal or f'{answer.byte_count} bytes'}")
        image = new_image(byte_count)
        _receive(made, image.numpy().data, bytes_per_s=bytes_per_s, ends_s=ends_s)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise PeerFailure(f"{what} is not copied: {error}") from error
    finally:
        if made is not None:
            made.close()
    if zlib.crc32(image.numpy().data) != answer.checksum:
        raise PeerFailure(f"{what} is not copied: its checksum differs")
    return image


def _receive(made: socket.socket, into: memoryview, *, bytes_per_s: float, ends_s: float) -> None:
    """Fill `into` no faster than `bytes_per_s`: what is not read yet holds the sender up. Raises OSError."""
    begun_s = monotonic()
    for start in range(0, len(into), CHUNK_BYTES):
        now_s = monotonic()
        if now_s >= ends_s:
            raise TimeoutError("it takes too long")
        sleep(max(0.0, begun_s + start / bytes_per_s - now_s))
        made.settimeout(max(0.01, ends_s - monotonic()))
        receive_into(made, into[start : start + CHUNK_BYTES])
