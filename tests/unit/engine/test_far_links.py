"""Strangers at the doors of an expert rank, and ends of links that break the protocol: a link may end, but
nobody else notices."""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import PeerFailure
from engine.experts import far_door
from engine.experts.doors import SILENT_MAX, LocalDoor
from engine.experts.exchange import FINISHED, FREE, POSTED, TAKEN
from engine.experts.far_door import GREETERS, FarDoor
from engine.experts.far_links import FarLink, receive_message, send_message
from engine.experts.hello import LinkAnswer, LinkHello
from tests.expert_links import LAYOUT, WAIT_S, LinkWorld, census, data, first_census

HELLO = msgspec.structs.replace(LinkHello.of(LAYOUT, secret="the secret", caller="c"), link="l")
RESULTS = msgspec.structs.replace(HELLO, carries_results=True)
HEAD = struct.Struct("<iiiii")


@pytest.fixture
def far() -> Iterator[LinkWorld]:
    yield from world_of("far")


@pytest.fixture
def local() -> Iterator[LinkWorld]:
    yield from world_of("local")


def world_of(kind: str) -> Iterator[LinkWorld]:
    before = first_census()
    world = LinkWorld(kind)
    yield world
    world.close()
    assert census() == before


def dial(world: LinkWorld) -> socket.socket:
    assert isinstance(world.door, FarDoor)
    made = socket.create_connection(("127.0.0.1", world.door.port), WAIT_S)
    made.settimeout(WAIT_S)
    return made


def greet(world: LinkWorld, hello: LinkHello) -> tuple[socket.socket, str]:
    """A connection, and why it is refused."""
    made = dial(world)
    send_message(made, msgspec.json.encode(hello))
    answer = msgspec.json.decode(receive_message(made, timeout_s=WAIT_S), type=LinkAnswer)
    return made, answer.refusal


def joined(world: LinkWorld) -> tuple[socket.socket, socket.socket]:
    """The two connections of a link, as a caller has them that is not ours."""
    requests, refused = greet(world, HELLO)
    assert not refused
    results, refused = greet(world, RESULTS)
    assert not refused
    world.rank.until_links(1)
    return requests, results


def works(world: LinkWorld) -> None:
    """A caller of ours is served."""
    end = world.connect()
    end.post(0, data(1))
    slot, bell = world.rank.until_posted()
    world.rank.finish(slot, bell, size=LAYOUT.row_bytes)
    assert end.until(0, FINISHED) == FINISHED
    world.ends.remove(end)
    end.close()


def ends(made: socket.socket) -> bool:
    """The other end closes the connection; what it says before does not count."""
    with contextlib.suppress(ConnectionError):
        while made.recv(4096):
            pass
    return True


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


FIELDS = [field.name for field in msgspec.structs.fields(LinkHello)]
GREETINGS = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=60).map(lambda text: struct.pack("<I", len(text)) + text),
    st.integers(4097, 2**32 - 1).map(lambda size: struct.pack("<I", size) + b"{"),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
        max_leaves=12,
    ).map(lambda value: framed(json.dumps(value).encode())),
    st.fixed_dictionaries(
        {},
        optional={
            "secret": st.sampled_from(["the secret", "ein Geheimnis für uns", ""]),
            "hidden": st.sampled_from([LAYOUT.hidden, 0, -1, 2**70]),
            "pairs_max": st.integers(-1, 3000),
            "row_kind": st.integers(-1, 5),
            "link": st.sampled_from(["", "l", "m"]),
            "carries_results": st.booleans(),
        },
    ).map(lambda changes: framed(json.dumps({**msgspec.to_builtins(HELLO), **changes}).encode())),
)


def test_no_greeting_of_a_stranger_stops_the_door(far: LinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_door, "HALF_OPEN_S", 0.01)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(GREETINGS, min_size=1, max_size=4))
    def strangers_come(greetings: list[bytes]) -> None:
        for greeting in greetings:
            with dial(far) as made:
                with contextlib.suppress(OSError):  # it may be closed already
                    made.sendall(greeting)
                    made.shutdown(socket.SHUT_WR)
                assert ends(made)

    strangers_come()
    works(far)


def test_deeply_nested_greetings_are_refused(far: LinkWorld) -> None:
    for text in (b'{"x":' + b"[" * 4000, b'{"secret":' + b"{" * 10):
        with dial(far) as made:
            made.sendall(framed(text))
            assert ends(made)
    works(far)


def test_silent_strangers_hold_nobody_up(far: LinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than there are greeters; then more, whose time must pass first."""
    monkeypatch.setattr(far_door, "CONNECT_S", 1.0)
    with contextlib.ExitStack() as stack:
        for _ in range(GREETERS - 1):
            stack.enter_context(dial(far)).sendall(b"\x20")
        works(far)
        for _ in range(3 * GREETERS):
            stack.enter_context(dial(far)).sendall(b"\x20")
        assert ends(stack.enter_context(dial(far)))
        works(far)


def test_one_who_speaks_slowly_has_no_more_time(far: LinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_door, "CONNECT_S", 1.0)
    with dial(far) as made:
        made.sendall(struct.pack("<I", 4000))
        pause = threading.Event()
        is_closed = False
        for _ in range(int(WAIT_S / 0.05)):
            try:
                made.sendall(b"{")
            except ConnectionError:
                is_closed = True
                break
            pause.wait(0.05)
        assert is_closed


def test_more_connections_than_can_be_greeted_are_closed(
    far: LinkWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_door, "GREETINGS_MAX", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(dial(far))
        far.beat_until(lambda: far.door.connection_count == 3)
        assert ends(stack.enter_context(dial(far)))


def test_the_connections_of_a_link_come_in_their_order(far: LinkWorld) -> None:
    made, refused = greet(far, RESULTS)
    made.close()
    assert "came without the other" in refused
    first, refused = greet(far, HELLO)
    assert not refused
    for hello, says in (
        (HELLO, "no name of its own"),
        (msgspec.structs.replace(HELLO, link=""), "no name of its own"),
        (msgspec.structs.replace(RESULTS, pairs_max=LAYOUT.pairs_max + 1), "other slots"),
        (RESULTS, "came without the other"),
    ):
        made, refused = greet(far, hello)
        assert says in refused
        assert ends(made)
        made.close()
    assert ends(first)
    first.close()
    assert not far.rank.links
    works(far)


def test_half_a_link_is_closed_after_a_while(far: LinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_door, "HALF_OPEN_S", 0.1)
    made, refused = greet(far, HELLO)
    assert not refused
    assert ends(made)
    made.close()
    assert far.door.connection_count == 0


@pytest.mark.parametrize(
    "head",
    [
        (4, 0, 1, 1, -1),
        (-1, 0, 1, 1, -1),
        (-(2**31), 0, 1, 1, -1),
        (0, 0, 0, 1, -1),
        (0, 0, -5, -5, -1),
        (0, 0, 2, 1, -1),
        (0, 0, 1, 65, -1),
        (0, 0, 1, 2**31 - 1, -1),
    ],
)
def test_a_caller_that_breaks_the_protocol_loses_its_link(far: LinkWorld, head: tuple[int, ...]) -> None:
    requests, results = joined(far)
    requests.sendall(HEAD.pack(*head))
    assert ends(results)
    far.rank.until_links(0)
    requests.close()
    results.close()
    works(far)


def test_a_slot_in_use_takes_no_second_request(far: LinkWorld) -> None:
    requests, results = joined(far)
    request = HEAD.pack(0, 0, 1, 1, -1) + bytes(8 + LAYOUT.row_bytes)
    requests.sendall(request)
    far.rank.until_posted()
    requests.sendall(request)
    assert ends(results)
    far.rank.until_links(0)
    requests.close()
    results.close()


def test_whatever_a_caller_sends_costs_only_its_link(far: LinkWorld) -> None:
    @given(st.binary(min_size=1, max_size=200))
    @settings(max_examples=25, deadline=None)
    def it_sends(rubbish: bytes) -> None:
        requests, results = joined(far)
        with contextlib.suppress(OSError):
            requests.sendall(rubbish)
            requests.shutdown(socket.SHUT_WR)
        assert ends(results)
        far.rank.until_links(0)
        requests.close()
        results.close()

    it_sends()
    works(far)


class WrongRank:
    """Listens, agrees, and answers what the test says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.made: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for _ in range(2):
            made, _ = self._listener.accept()
            made.settimeout(WAIT_S)
            receive_message(made, timeout_s=WAIT_S)
            send_message(made, msgspec.json.encode(LinkAnswer()))
            self.made.append(made)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()
        for made in self.made:
            made.close()


@pytest.mark.parametrize(
    "answer",
    [
        HEAD.pack(4, 0, 0, 1, -1),
        HEAD.pack(-2, 0, 0, 1, -1),
        HEAD.pack(1, 0, 0, 1, -1),
        HEAD.pack(0, 0, 0, 2, -1) + bytes(2 * LAYOUT.result_bytes),
        HEAD.pack(0, 0, 0, -1, -1),
        HEAD.pack(0, 0, 0, 1, -1) + bytes(LAYOUT.result_bytes - 1),
    ],
)
def test_a_rank_that_breaks_the_protocol_loses_its_link(far: LinkWorld, answer: bytes) -> None:
    """Nothing of what it sent counts as a result."""
    rank = WrongRank()
    end = far.connect(address=f"127.0.0.1:{rank.port}")
    end.post(0, data(1))
    rank.made[0].recv(HEAD.size)  # it was sent
    rank.made[1].sendall(answer)
    rank.made[1].shutdown(socket.SHUT_WR)
    end.until_over()
    assert end.slots[0].state == TAKEN
    rank.close()


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "[::1]:1"])
def test_addresses_that_lead_nowhere(far: LinkWorld, address: str) -> None:
    with pytest.raises(PeerFailure):
        far.connect(address=address)


def test_an_interface_has_many_names(far: LinkWorld) -> None:
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    for listen, dialled in (("::1", "[::1]"), ("::", "[::1]"), ("localhost", "localhost")):
        door = FarDoor(listen, far.rank)
        ref = msgspec.structs.replace(far.ref, address=f"{dialled}:{door.port}")
        link = FarLink.connect(ref, LAYOUT, far.bell, caller="c")
        link.close()
        door.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_lack_of_descriptors_passes(far: LinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that cannot be opened is closed whole."""
    failing = threading.Event()
    failing.set()
    opened = far.rank.open_link

    def open_link(*arguments: Any) -> int:
        if failing.is_set():
            raise OSError(24, "too many open files")
        return opened(*arguments)

    monkeypatch.setattr(far.rank, "open_link", open_link)
    end = far.connect()
    end.until_over()
    failing.clear()
    works(far)


# --- the door for callers of the same host ---------------------------------------------------------------


def dial_local(world: LinkWorld) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(WAIT_S)
    made.connect(f"\0{world.name}")
    return made


def test_strangers_of_this_host(local: LinkWorld) -> None:
    hello = msgspec.json.encode(HELLO)
    small, reader_writer = os.memfd_create("small"), os.pipe()
    try:
        for text, fds in (
            (b"", []),
            (b"\xff", []),
            (b'{"x":' + b"[" * 4000, []),
            (hello, []),
            (hello, [small]),
            (hello, [small, small]),
            (hello, list(reader_writer)),
            (hello, [small] * 5),
            (hello.replace(b"the secret", "größer".encode()), [small, small]),
        ):
            with dial_local(local) as made:
                if text:
                    socket.send_fds(made, [text], fds)
                else:
                    made.shutdown(socket.SHUT_WR)
                assert ends(made)
    finally:
        for fd in (small, *reader_writer):
            os.close(fd)
    works(local)


def test_silent_strangers_of_this_host_hold_nobody_up(
    local: LinkWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.experts.doors.CONNECT_S", 1.0)
    assert isinstance(local.door, LocalDoor)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial_local(local)) for _ in range(SILENT_MAX // 2)]
        works(local)
        assert all(ends(made) for made in silent)
    local.beat_until(lambda: local.door.connection_count == 0)


def test_slots_of_a_far_rank_say_when_they_were_posted(far: LinkWorld) -> None:
    """Else rows of other hosts would always be computed first."""
    end = far.connect()
    end.post(0, data(1))
    slot, _ = far.rank.until_posted()
    assert abs(int(slot._times[3]) - int(end.slots[0]._times[3])) < 60e9
    assert slot._times[3] > 0
    assert {FREE, POSTED}.isdisjoint({end.slots[0].state})
