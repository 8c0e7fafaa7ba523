"""Both ends of a link between a caller and an expert rank, driven by a test: it posts, and it answers."""

import gc
import os
import select
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from baton.core.experts import ExpertRankRef
from baton.core.ids import ExpertRankId
from engine.experts.doors import LocalDoor, LocalLink
from engine.experts.exchange import FINISHED, POSTED, ROW_F32, TAKEN, Bell, MappedMemory, SlotLayout, SlotView
from engine.experts.far_door import FarDoor
from engine.experts.far_links import FarLink
from engine.native.library import F32

HIDDEN = 32
LAYOUT = SlotLayout(HIDDEN, pairs_max=64, slot_count=4, row_kind=ROW_F32, result_kind=F32)
WAIT_S = 20.0


class HandRank:
    """A rank that the test is: it sees the slots of all links, and answers when it is told to."""

    def __init__(self) -> None:
        self.hidden, self.secret, self.bell = HIDDEN, "the secret", Bell()
        self.links: dict[int, tuple[list[SlotView], Bell]] = {}
        self.changed = threading.Condition()
        self._count = 0

    def open_link(self, layout: SlotLayout, memory: MappedMemory, bell: Bell) -> int:
        slots = [SlotView(memory, layout, index) for index in range(layout.slot_count)]
        with self.changed:
            self._count += 1
            self.links[self._count] = slots, bell
            self.changed.notify_all()
            return self._count

    def close_link(self, number: int) -> None:
        with self.changed:
            del self.links[number]
            self.changed.notify_all()

    def until_links(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.links) == count, WAIT_S)

    def until_posted(self) -> tuple[SlotView, Bell]:
        """The next posted slot and its caller's bell; it is taken."""
        while True:
            seen = self.bell.count
            for slots, bell in list(self.links.values()):
                for slot in slots:
                    if slot.state == POSTED:
                        slot.state = TAKEN
                        return slot, bell
            self.bell.wait(seen, WAIT_S)
            assert self.bell.count != seen, "nothing was posted"

    def finish(self, slot: SlotView, bell: Bell, *, size: int) -> None:
        """Answer with the rows, each number one more than it was."""
        slot.results[:size] = bytes((byte + 1) % 256 for byte in slot.rows[:size])
        slot.state = FINISHED
        bell.ring()


class HandCaller:
    """The caller's end, which the test is too."""

    def __init__(self, link: Any, bell: Bell) -> None:
        self.link, self.bell = link, bell
        self.slots = [SlotView(link.memory, LAYOUT, index) for index in range(LAYOUT.slot_count)]

    def post(self, index: int, data: bytes, *, layer: int = 1) -> None:
        slot = self.slots[index]
        pairs = len(data) // LAYOUT.row_bytes
        slot.row_of[: 4 * pairs] = b"".join(n.to_bytes(4, "little") for n in range(pairs))
        slot.experts[: 4 * pairs] = b"".join((n + 7).to_bytes(4, "little") for n in range(pairs))
        slot.rows[: len(data)] = data
        slot.set_sizes(layer, pairs, pairs)
        slot.stamp()
        slot.state = POSTED
        self.link.bell.ring()

    def until(self, index: int, *states: int) -> int:
        while (state := self.slots[index].state) not in states:
            seen = self.bell.count
            if self.slots[index].state not in states:
                self.bell.wait(seen, WAIT_S)
                assert self.bell.count != seen, f"slot {index} stays {state}"
        return state

    def until_over(self) -> None:
        """The link says by itself that it is over."""
        assert poll(self.link.fileno()), "the link does not end"

    def close(self) -> None:
        self.slots.clear()
        self.link.close()


def poll(fd: int, timeout_s: float = WAIT_S) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


class LinkWorld:
    """A rank with the door of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rank = kind, HandRank()
        self.name = f"test-{os.urandom(8).hex()}"
        self.door: LocalDoor | FarDoor = self._open()
        self.bell = Bell()
        self.ends: list[HandCaller] = []

    def _open(self) -> LocalDoor | FarDoor:
        if self.kind == "local":
            return LocalDoor(self.name, self.rank)
        return FarDoor("127.0.0.1", self.rank)

    @property
    def ref(self) -> ExpertRankRef:
        port = self.door.port if isinstance(self.door, FarDoor) else 1
        return ExpertRankRef(ExpertRankId("r"), "h", self.name, f"127.0.0.1:{port}", self.rank.secret)

    def connect(self, layout: SlotLayout = LAYOUT, **changes: str) -> HandCaller:
        ref = msgspec.structs.replace(self.ref, **changes)
        link = (LocalLink if self.kind == "local" else FarLink).connect(ref, layout, self.bell, caller="c")
        self.ends.append(HandCaller(link, self.bell))
        return self.ends[-1]

    def beat_until(self, holds: Callable[[], bool]) -> None:
        """The rank shows signs of life until something holds."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):
            if holds():
                return
            self.rank.bell.beat()
            pause.wait(0.02)
        raise AssertionError("it never holds")

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.door.close()
        self.bell.close()
        self.rank.bell.close()


def first_census() -> tuple[int, int, list[str]]:
    """The census before a test. What earlier tests left in circles is closed now, and not in its middle."""
    gc.collect()
    return census()


def census() -> tuple[int, int, list[str]]:
    """Descriptors, mapped memfds and threads of ours."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:baton-experts" in line for line in maps)
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("experts"))
    return len(os.listdir("/proc/self/fd")), mapped, threads


def data(rows: int, seed: int = 0) -> bytes:
    return bytes((seed + n) % 256 for n in range(rows * LAYOUT.row_bytes))


def plus_one(sent: bytes) -> bytes:
    return bytes((byte + 1) % 256 for byte in sent)
