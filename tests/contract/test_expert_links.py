"""What every kind of link between a caller and an expert rank must do: on one host, over TCP, and over TCP
with mutual TLS. The tests themselves drive the slots of both ends."""

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.core.errors import PeerFailure
from baton.wire.transport import secure
from engine.experts.exchange import FINISHED, FREE, REFUSED, SlotLayout
from tests.certificates import make_folder, secure_tests, tls_of
from tests.expert_links import HIDDEN, LAYOUT, LinkWorld, census, data, first_census, plus_one, poll

KINDS = ("local", "far", "far-tls")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "far-tls":
        pytest.importorskip("cryptography")
        secure(tls_of(make_folder(tmp_path_factory.mktemp("certificates"))))
    yield request.param
    secure_tests()


@pytest.fixture
def world(kind: str) -> Iterator[LinkWorld]:
    before = first_census()
    made = LinkWorld(kind)
    yield made
    made.close()
    assert census() == before


def test_rows_go_and_results_come_through_every_slot(world: LinkWorld) -> None:
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


def test_answers_may_come_in_any_order(world: LinkWorld) -> None:
    end = world.connect()
    for index in range(4):
        end.post(index, data(2, index))
    taken = [world.rank.until_posted() for _ in range(4)]
    for slot, bell in reversed(taken):
        world.rank.finish(slot, bell, size=2 * LAYOUT.row_bytes)
        assert end.until(slot.index, FINISHED) == FINISHED
        assert end.slots[slot.index].results[:99] == plus_one(data(2, slot.index))[:99]


def test_a_refused_expert_is_named_and_the_slot_goes_on(world: LinkWorld) -> None:
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


def test_the_link_ends_by_itself_when_the_rank_does_while_it_has_slots(world: LinkWorld) -> None:
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


def test_signs_of_life_are_the_rank_s_own(world: LinkWorld) -> None:
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
    assert end.link.last_beat - before in (0, 1), "at most one more beat, which was due"
    world.beat_until(lambda: end.link.last_beat != before)


def test_the_rank_forgets_a_caller_that_ends_while_it_computes(world: LinkWorld) -> None:
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
    world: LinkWorld, layout: SlotLayout, secret: str, says: str
) -> None:
    with pytest.raises(PeerFailure, match=says):
        world.connect(layout, secret=secret)
    assert not world.rank.links
    world.connect().post(0, data(1))
    world.rank.until_posted()


def test_nobody_is_there(world: LinkWorld) -> None:
    world.door.close()
    with pytest.raises(PeerFailure, match="no connection"):
        world.connect(socket="nobody", address=f"127.0.0.1:{free_port()}")
    world.door = world._open()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nothing_is_left_of_two_hundred_callers(world: LinkWorld) -> None:
    """A third of them end in order, a third are refused, and a third vanish with rows under way."""
    world.connect()
    world.rank.until_links(1)
    before = first_census()
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
