"""What every kind of link between a caller and an expert rank must do, whoever is at its ends: on one host, over
TCP, and over TCP with mutual TLS. The ends' slots are driven by the tests themselves."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from baton.core.ids import ExpertRankId
from baton.wire.transport import secure
from engine.experts.doors import LocalDoor, LocalLink
from engine.experts.exchange import (
    FINISHED,
    FREE,
    POSTED,
    REFUSED,
    ROW_F32,
    TAKEN,
    Bell,
    Memory,
    SlotLayout,
    SlotView,
)
from engine.experts.far_door import FarDoor
from engine.experts.far_links import FarLink
from engine.native.library import F32
from tests.certificates import make_folder, secure_tests, tls_of

KINDS = ("local", "far", "far-tls")
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

    def open_link(self, layout: SlotLayout, memory: Memory, bell: Bell) -> int:
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
            before = self.bell.count
            self.bell.wait(seen, WAIT_S)
            assert self.bell.count != before or seen != before, "nothing was posted"

    def finish(self, slot: SlotView, bell: Bell, *, size: int) -> None:
        """Answer with the rows, each number one more than it was."""
        slot.results[:size] = bytes((byte + 1) % 256 for byte in slot.rows[:size])
        slot.state = FINISHED
        bell.ring()


class End:
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
    import select

    return bool(select.select([fd], [], [], timeout_s)[0])


class World:
    """A rank with the door of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rank = kind, HandRank()
        self.name = f"test-{os.urandom(8).hex()}"
        self.door: LocalDoor | FarDoor = self._open()
        self.bell = Bell()
        self.ends: list[End] = []

    def _open(self) -> LocalDoor | FarDoor:
        if self.kind == "local":
            return LocalDoor(self.name, self.rank)
        return FarDoor("127.0.0.1", self.rank)

    @property
    def ref(self) -> ExpertRankRef:
        port = self.door.port if isinstance(self.door, FarDoor) else 1
        return ExpertRankRef(ExpertRankId("r"), "h", self.name, f"127.0.0.1:{port}", self.rank.secret)

    def connect(self, layout: SlotLayout = LAYOUT, **changes: str) -> End:
        ref = msgspec.structs.replace(self.ref, **changes)
        link = (LocalLink if self.kind == "local" else FarLink).connect(ref, layout, self.bell, caller="c")
        self.ends.append(End(link, self.bell))
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


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "far-tls":
        pytest.importorskip("cryptography")
        secure(tls_of(make_folder(tmp_path_factory.mktemp("certificates"))))
    yield request.param
    secure_tests()


@pytest.fixture
def world(kind: str) -> Iterator[World]:
    before = census()
    made = World(kind)
    yield made
    made.close()
    assert census() == before


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


def test_rows_go_and_results_come_through_every_slot(world: World) -> None:
    end = world.connect()
    for turn in range(3):
        for index, rows in enumerate((1, 3, 64, 17)):
            end.post(index, data(rows, turn + index), layer=index)
        for _ in range(4):
            slot, bell = world.rank.until_posted()
            layer, rows, pairs, _ = slot.sizes
            assert (layer, rows) == (slot.index, pairs)
            assert slot.experts[:4] == (7).to_bytes(4, "little")
            world.rank.finish(slot, bell, size=rows * LAYOUT.row_bytes)
        for index, rows in enumerate((1, 3, 64, 17)):
            assert end.until(index, FINISHED, REFUSED) == FINISHED
            size = rows * LAYOUT.row_bytes
            assert end.slots[index].results[:size] == plus_one(data(rows, turn + index))
            end.slots[index].state = FREE


def test_answers_may_come_in_any_order(world: World) -> None:
    end = world.connect()
    for index in range(4):
        end.post(index, data(2, index))
    taken = [world.rank.until_posted() for _ in range(4)]
    for slot, bell in reversed(taken):
        world.rank.finish(slot, bell, size=2 * LAYOUT.row_bytes)
        assert end.until(slot.index, FINISHED) == FINISHED
        assert end.slots[slot.index].results[:99] == plus_one(data(2, slot.index))[:99]


def test_a_refused_expert_is_named_and_the_slot_goes_on(world: World) -> None:
    end = world.connect()
    for expert in (5, 40_000, -1):
        end.post(2, data(3))
        slot, bell = world.rank.until_posted()
        layer, rows, pairs, _ = slot.sizes
        slot.set_sizes(layer, rows, pairs, expert)
        slot.state = REFUSED
        bell.ring()
        assert end.until(2, FINISHED, REFUSED) == REFUSED
        assert end.slots[2].sizes[3] == expert
        end.slots[2].state = FREE
    end.post(2, data(1))
    slot, bell = world.rank.until_posted()
    world.rank.finish(slot, bell, size=LAYOUT.row_bytes)
    assert end.until(2, FINISHED, REFUSED) == FINISHED


def test_the_link_ends_by_itself_when_the_rank_does_while_it_has_slots(world: World) -> None:
    end = world.connect()
    end.post(0, data(64))
    end.post(1, data(1))
    world.rank.until_posted()
    world.door.close()
    end.until_over()
    assert end.link.end_reason()
    assert end.slots[0].state != FINISHED
    world.door = world._open()
    world.connect().post(0, data(1))
    world.rank.until_posted()


def test_signs_of_life_are_the_rank_s_own(world: World) -> None:
    """A rank that hangs is silent, though its doors' threads run and the connection stays."""
    end = world.connect()
    before = end.link.last_beat
    world.beat_until(lambda: end.link.last_beat != before)
    end.post(0, data(1))  # what was under way has arrived with the answer to this
    slot, bell = world.rank.until_posted()
    world.rank.finish(slot, bell, size=LAYOUT.row_bytes)
    end.until(0, FINISHED)
    before = end.link.last_beat
    assert not poll(end.link.fileno(), 0.3)
    assert end.link.last_beat - before in (0, 20), "at most one more beat, which was due"
    world.beat_until(lambda: end.link.last_beat != before)


def test_the_rank_forgets_a_caller_that_ends_while_it_computes(world: World) -> None:
    end, other = world.connect(), world.connect()
    end.post(0, data(64))
    world.rank.until_posted()
    world.ends.remove(end)
    end.close()
    world.rank.until_links(1)
    other.post(3, data(2))
    slot, bell = world.rank.until_posted()
    world.rank.finish(slot, bell, size=2 * LAYOUT.row_bytes)
    assert other.until(3, FINISHED) == FINISHED


@pytest.mark.parametrize(
    ("layout", "secret", "says"),
    [
        (replace(LAYOUT, hidden=HIDDEN + 1), "the secret", "hidden size is 32"),
        (replace(LAYOUT, pairs_max=10**6), "the secret", "no such slots"),
        (replace(LAYOUT, slot_count=65), "the secret", "no such slots"),
        (LAYOUT, "another", "the secret is not"),
        (LAYOUT, "", "the secret is not"),
        (LAYOUT, "gehört uns nicht", "the secret is not"),
    ],
)
def test_who_does_not_fit_is_refused_with_the_reason(
    world: World, layout: SlotLayout, secret: str, says: str
) -> None:
    with pytest.raises(PeerFailure, match=says):
        world.connect(layout, secret=secret)
    assert not world.rank.links
    world.connect().post(0, data(1))
    world.rank.until_posted()


def test_nobody_is_there(world: World) -> None:
    world.door.close()
    with pytest.raises(PeerFailure, match="no connection"):
        world.connect(socket="nobody", address=f"127.0.0.1:{free_port()}")
    world.door = world._open()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nothing_is_left_of_two_hundred_callers(world: World) -> None:
    """A third of them end in order, a third are refused, and a third vanish with rows under way."""
    world.connect()
    world.rank.until_links(1)
    before = census()
    for turn in range(200):
        if turn % 3 == 1:
            with pytest.raises(PeerFailure):
                world.connect(secret="another")
            continue
        end = world.connect()
        world.ends.remove(end)
        if turn % 3 == 2:
            end.post(0, data(64))
        end.close()
    world.rank.until_links(1)
    world.beat_until(lambda: census()[:2] == before[:2])
