"""The door of a group on several hosts: ranks pass it, strangers do not."""

import contextlib
import socket
import ssl
import struct
import threading
import time

import pytest

from baton.config import Config
from baton.core.errors import PeerFailure, SetupError
from baton.wire.parties import Party
from baton.wire.transport import secure
from engine.parallel import meeting, mesh, order_stream
from engine.parallel.group import GroupBroken
from engine.parallel.meeting import Greeting, MeetingPlace, greet
from engine.parallel.mesh import FrameLimit, Mesh, Purpose
from engine.parallel.order_stream import OrderStreamReceiver, OrderStreamSender
from engine.parallel.orders import AdapterRead, DropAdapter, FollowerFailed, shortened
from tests.certificates import make_folder, tls_of
from tests.unit.engine.parallel.threads import DEADLINE_S, on_all, values

HERE = "127.0.0.1"


@pytest.fixture
def meshes():
    made = [Mesh.create(2, host=HERE, reached_at=HERE)]
    yield made
    for one in made:
        one.close()


def hung_up(connection):
    """Whether the other end closes the connection without a word."""
    connection.settimeout(DEADLINE_S)
    try:
        return connection.recv(1) == b""
    except (ConnectionResetError, ssl.SSLError):
        return True
    finally:
        connection.close()


def whole(meshes):
    meshes.append(Mesh.join(meshes[0].address, 1))
    values(on_all(meshes, lambda one: one.wait_for_all(DEADLINE_S)))


@pytest.mark.parametrize(
    "wrong",
    [{"token": b"x" * 16}, {"token": b""}, {"rank": 0}, {"rank": 2}, {"rank": -1}, {"purpose": "anything"}],
    ids=str,
)
def test_a_stranger_is_turned_away_and_the_ranks_meet_all_the_same(meshes, wrong):
    place = meshes[0].place
    said = {"token": place.token, "rank": 1, "purpose": Purpose.MESSAGES, "address": "h:1", **wrong}
    assert hung_up(greet(f"{HERE}:{place.port}", Greeting(**said)))
    whole(meshes)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""])
def test_other_words_are_no_greeting(meshes, words):
    connection = socket.create_connection((HERE, meshes[0].place.port))
    connection.sendall(words)
    with contextlib.suppress(OSError):  # it may have been turned away already
        connection.shutdown(socket.SHUT_WR)
    assert hung_up(connection)
    whole(meshes)


def test_a_rank_is_there_once(meshes):
    whole(meshes)
    with pytest.raises(SetupError, match="does not reach rank 0"):
        Mesh.join(meshes[0].address, 1)  # nobody listens any more


@pytest.mark.parametrize("address", ["", "nothing", "zz@h:1", "00@h", "00@h:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(SetupError, match="no address of a group"):
        MeetingPlace.parse(address)


def test_who_waits_for_ranks_hears_of_the_end(meshes):
    waiting = threading.Thread(target=meshes[0].abort, args=("rank 1 cannot start",))
    waiting.start()
    with pytest.raises(GroupBroken, match="cannot start"):
        meshes[0].wait_for_all(DEADLINE_S)
    waiting.join()


def test_a_stranger_that_trickles_is_turned_away_in_time(monkeypatch):
    now_s = 0.0

    class Trickling:
        """Each byte comes within the time that the last wait allows, after which it is later."""

        def settimeout(self, timeout_s):
            assert 0 < timeout_s <= meeting.GREET_S - now_s

        def recv(self, size):
            nonlocal now_s
            now_s += 1.0
            return b"\0"

        def close(self):
            pass

    monkeypatch.setattr(meeting.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(meeting, "_SIZE", struct.Struct("<Q"))
    with pytest.raises(PeerFailure, match="longer than 5 s"):
        meeting.read_greeting(Trickling(), meeting.GREET_S)


def test_rank_0_cannot_tell_of_more_ranks_than_there_are(meshes, monkeypatch):
    meshes.append(Mesh.join(meshes[0].address, 1))
    monkeypatch.setattr(mesh, "RANKS_MAX", 1)
    told = on_all(meshes, lambda one: one.wait_for_all(DEADLINE_S))[1]
    assert isinstance(told, GroupBroken)
    assert "2 ranks" in str(told)


# --- sizes of messages ---


@pytest.fixture
def channel():
    star = Mesh.create(2, host=HERE, reached_at=HERE, is_star=True)
    leader = OrderStreamSender(star, deadline_s=DEADLINE_S)
    follower = OrderStreamReceiver(Mesh.join(leader.address, 1, is_star=True), deadline_s=DEADLINE_S)
    values(on_all([leader, follower], lambda end: end.wait_for_all(timeout_s=DEADLINE_S)))
    yield leader, follower
    leader.close()
    follower.close()


def test_more_than_may_be_sent_is_no_reason_to_take_memory(channel):
    leader, follower = channel
    follower._mesh.send(
        0, Purpose.MESSAGES, [struct.pack("<I", 2**32 - 1)], "a lie", time.monotonic() + DEADLINE_S
    )
    with pytest.raises(
        GroupBroken, match="rank 1 sends 4294967295 bytes as a report, which may have at most"
    ):
        leader.receive(timeout_s=DEADLINE_S)
    with pytest.raises(GroupBroken, match="4294967295 bytes as a report"):
        follower.receive(timeout_s=DEADLINE_S)


def test_an_order_that_is_too_long_is_not_sent(channel, monkeypatch):
    leader, follower = channel
    monkeypatch.setattr(order_stream, "ORDER", FrameLimit("an order", 10))
    with pytest.raises(GroupBroken, match=r"rank 0 sends \d+ bytes as an order, which may have at most 10"):
        leader.send(DropAdapter("a key of an adapter"))
    with pytest.raises(GroupBroken, match="rank 0 sends"):
        follower.receive(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("report", [FollowerFailed("\U0001f600" * 10**6), AdapterRead("key", "x" * 10**6)])
def test_a_report_arrives_however_much_there_is_to_say(channel, report):
    leader, follower = channel
    follower.report(report)
    rank, found = leader.receive(timeout_s=DEADLINE_S)
    assert rank == 1
    assert found == shortened(report) != report


# --- mutual TLS ---


@pytest.fixture
def tls(tmp_path):
    pytest.importorskip("cryptography")
    ours, theirs = make_folder(tmp_path / "ours"), make_folder(tmp_path / "theirs")
    yield ours, theirs
    secure(Config().tls)


def test_ranks_show_a_worker_s_certificate_and_strangers_have_none(tls):
    ours, theirs = tls
    secure(tls_of(ours, Party.WORKER.value))
    first = Mesh.create(2, host=HERE, reached_at=HERE)
    port = first.place.port
    try:
        assert hung_up(socket_without_certificate(port, ours))
        for folder, name in ((theirs, "worker"), (ours, "router")):
            context = ssl.create_default_context(cafile=str(ours / "ca.pem"))
            context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
            context.check_hostname = False
            assert hung_up(context.wrap_socket(socket.create_connection((HERE, port))))
        meshes = [first]
        whole(meshes)
        meshes[1].close()
    finally:
        first.close()


def socket_without_certificate(port, folder):
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False
    return context.wrap_socket(socket.create_connection((HERE, port)))


def test_a_rank_does_not_speak_to_a_server_that_is_no_worker(tls):
    ours, _ = tls
    secure(tls_of(ours, Party.WORKER.value))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ours / "ca.pem"))
    context.load_cert_chain(ours / "router.pem", ours / "router.key")
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]

        def answer():
            connection = listener.accept()[0]
            with connection, contextlib.suppress(ssl.SSLError):
                context.wrap_socket(connection, server_side=True).close()

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(PeerFailure, match="CERTIFICATE_VERIFY_FAILED"):
            greet(f"{HERE}:{port}", Greeting(b"", 1, Purpose.PULSE, ""))
        server.join()
