"""What a caller and an expert rank say to each other when a connection begins."""

import hmac

import msgspec

from engine.experts.exchange import SlotLayout

HELLO_BYTES_MAX = 4096
CONNECT_S = 2.0
"""The longest time for a connection to be made and greeted."""


class LinkHello(msgspec.Struct, frozen=True):
    """The caller's first words."""

    secret: str
    caller: str
    hidden: int
    pairs_max: int
    slot_count: int
    row_kind: int
    result_kind: int
    link: str = ""
    """Name of the link, where two connections make one."""
    carries_results: bool = False
    """Whether this is the connection on which results come back."""
    expert: int = -1
    """An expert whose image is asked for, on a connection for nothing else; -1: rows are to be sent."""
    image_kind: str = ""
    """The kind of image that the caller can use."""

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.hidden, self.pairs_max, self.slot_count, self.row_kind, self.result_kind)

    @classmethod
    def of(cls, layout: SlotLayout, *, secret: str, caller: str) -> "LinkHello":
        return cls(secret, caller, *layout.numbers)


class LinkAnswer(msgspec.Struct, frozen=True):
    """The rank's answer."""

    refusal: str = ""
    """Why the caller may not send rows, or gets no image; empty: it may."""
    byte_count: int = 0
    """Size of the image that follows."""
    checksum: int = 0


def refusal(hello: LinkHello, *, secret: str, hidden: int) -> str:
    """Why a rank refuses a caller; empty: it does not."""
    if not hmac.compare_digest(hello.secret.encode(), secret.encode()):
        return "the secret is not this rank's"
    return "" if hello.expert >= 0 else hello.layout.check(hidden)
