"""The door of a group on several hosts: ranks pass it, strangers do not."""

import contextlib
import socket
import ssl
import threading

import pytest

from baton.config import Config
from baton.core.errors import PeerFailure, SetupError
from baton.wire.parties import Party
from baton.wire.transport import secure
from engine.parallel.group import GroupBroken
from engine.parallel.meeting import Greeting, MeetingPlace, greet
from engine.parallel.mesh import Mesh, Purpose
from tests.certificates import make_folder, tls_of
from tests.unit.engine.parallel.threads import DEADLINE_S, on_all, values

HERE = "127.0.0.1"


@pytest.fixture
def meshes():
    made = [Mesh.create(2, host=HERE, reached_at=HERE)]
    yield made
    for mesh in made:
        mesh.close()


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
    values(on_all(meshes, lambda mesh: mesh.wait_for_all(DEADLINE_S)))


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
