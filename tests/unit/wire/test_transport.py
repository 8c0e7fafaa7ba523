"""Real gRPC on loopback with mutual TLS: who is let in, who is not, and what they are told."""

import logging
import os
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest

from baton.config import AccessConfig, Config, TlsConfig
from baton.core.budgets import Ledger
from baton.core.errors import SetupError
from baton.core.ids import RouterId
from baton.core.store_admin import AskClear, AskDrain, AskStatus, Done, NodeStatus
from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of, write_book
from baton.wire import transport
from baton.wire.client import drain_worker, set_worker_role, worker_session, worker_status
from baton.wire.link import LinkBroken
from baton.wire.options import CHANNEL_OPTIONS
from baton.wire.parties import Party
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import baton_pb2_grpc as pb_grpc
from baton.wire.server import start_server
from baton.wire.store_nodes import ask_node
from baton.wire.transport import Standing, channel_to, secure
from tests.certificates import make_folder, tls_of
from tests.unit.wire.test_links import EchoPeer, EchoWorker

pytest.importorskip("cryptography")
R = RouterId("r")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("certs") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("certs") / "theirs")


@pytest.fixture(autouse=True)
def this_processes_identity_comes_back():
    yield
    secure(Config().tls)


class FakeStore:
    async def hello(self, theirs):
        return theirs

    async def serve_peer(self, theirs, link):
        pass

    async def answer(self, request):
        if isinstance(request, AskStatus):
            return NodeStatus("n", "h", 1, "a", "s", "m", 0.0, "lru", False, False, {})
        return Done("done")


@asynccontextmanager
async def serving(tls, access=None):
    """A server with everything, made with this identity; afterwards the process may take on another one."""
    secure(tls, access)
    worker = EchoWorker()
    server, port = await start_server(
        "127.0.0.1", 0, worker=worker, peer=EchoPeer(), store=FakeStore(), budgets=Ledger()
    )
    try:
        yield worker, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def bytes_of(*paths):
    return [path.read_bytes() for path in paths]


async def status_over(channel):
    async with channel:
        return await pb_grpc.WorkerStub(channel).GetStatus(pb.Empty(), timeout=5)


def raw(address, root, key=None, cert=None):
    credentials = grpc.ssl_channel_credentials(root, key, cert)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "worker.baton.internal")]
    return grpc.aio.secure_channel(address, credentials, options=options)


def expired(folder):
    from commands.certificates import Authority

    issued = Authority(folder)
    issued.issue("old", list(Party), domain="baton.internal", days=-0.1, now=datetime.now(UTC))
    return tls_of(folder, "old")


async def test_parts_of_one_cluster_speak_to_one_another(folder):
    async with serving(tls_of(folder)) as (_, address):
        assert (await worker_status(address)).worker_id == "w.1"
        async with worker_session(address, R) as (hello, _):
            assert hello.worker_id == "w.1"


async def test_who_has_no_certificate_of_ours_is_refused(folder, strangers):
    ca, key, cert = bytes_of(folder / "ca.pem", folder / "node.key", folder / "node.pem")
    their_key, their_cert = bytes_of(strangers / "node.key", strangers / "node.pem")
    old = expired(folder)
    async with serving(tls_of(folder)) as (_, address):
        assert (await status_over(raw(address, ca, key, cert))).worker_id == "w.1"
        for channel in (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS),
            raw(address, ca),
            raw(address, ca, their_key, their_cert),
            raw(address, ca, *bytes_of(folder / "old.key", folder / "old.pem")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status_over(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(SetupError, match="expired on"):
        secure(old)


async def test_a_plain_process_is_told_what_it_lacks(folder):
    async with serving(tls_of(folder)) as (_, address):
        secure(TlsConfig())
        with pytest.raises(LinkBroken, match=r"does it want TLS\? \(tls\.ca"):
            await worker_status(address)


async def test_a_process_of_another_cluster_is_told_so(folder, strangers):
    async with serving(tls_of(folder)) as (_, address):
        secure(tls_of(strangers))
        with pytest.raises(LinkBroken, match="not of our authority"):
            await worker_status(address)
        secure(tls_of(folder, ca=folder))
        assert await worker_status(address)


async def test_a_server_without_tls_is_not_spoken_to(folder):
    async with serving(TlsConfig()) as (_, address):
        secure(tls_of(folder))
        with pytest.raises(LinkBroken, match="does not speak TLS"):
            await worker_status(address)


async def test_a_store_cannot_pose_as_a_worker(folder):
    async with serving(tls_of(folder, "store")) as (_, address):
        secure(tls_of(folder, "router"))
        with pytest.raises(LinkBroken, match="of another part"):
            await worker_status(address)


@pytest.mark.parametrize("party", ["worker", "store", "operator"])
async def test_only_routers_open_sessions(folder, party):
    async with serving(tls_of(folder)) as (_, address):
        secure(tls_of(folder, party))
        for _ in range(5):
            with pytest.raises(LinkBroken) as refused:
                async with worker_session(address, R):
                    pass
            if "Internal error from Core" not in str(refused.value):
                break  # gRPC says that where the refusal overtakes what the caller writes
        assert f"PERMISSION_DENIED: the caller's certificate is of {party}" in str(refused.value)


@pytest.mark.parametrize("party", ["router", "worker", "store"])
async def test_only_control_plane_and_operators_drain_and_clear(folder, party):
    async with serving(tls_of(folder)) as (worker, address):
        secure(tls_of(folder, party))
        for call in (drain_worker(address), ask_node(address, AskClear())):
            with pytest.raises(LinkBroken, match="PERMISSION_DENIED"):
                await call
        assert not worker.draining


@pytest.mark.parametrize("party", ["control", "operator"])
async def test_control_plane_and_operators_do(folder, party):
    async with serving(tls_of(folder)) as (worker, address):
        secure(tls_of(folder, party))
        await drain_worker(address)
        assert worker.draining
        assert await ask_node(address, AskDrain()) == Done("done")


async def test_without_tls_a_token_says_who_may_operate(tmp_path, monkeypatch):
    place = tmp_path / "tokens"
    records = [
        TokenRecord("ada", Scope.OPERATE, digest_of("a")),
        TokenRecord("bob", Scope.VIEW, digest_of("b")),
    ]
    place.write_text(write_book(TokenBook(records)))
    monkeypatch.setenv("MINE", "a")
    monkeypatch.setenv("BOBS", "b")
    tokens = str(place)
    async with serving(TlsConfig(), AccessConfig(tokens=tokens)) as (worker, address):
        with pytest.raises(LinkBroken, match="wants an operator's token"):
            await drain_worker(address)
        secure(TlsConfig(), AccessConfig(tokens=tokens, token="env:BOBS"))
        with pytest.raises(LinkBroken, match="may only look"):
            await ask_node(address, AskClear())
        secure(TlsConfig(), AccessConfig(tokens=tokens, token="env:NOBODYS"))
        with pytest.raises(LinkBroken, match="NOBODYS"):
            await drain_worker(address)
        assert not worker.draining
        secure(TlsConfig(), AccessConfig(tokens=tokens, token="env:MINE"))
        await drain_worker(address)
        assert worker.draining
        assert isinstance(await ask_node(address, AskStatus()), NodeStatus)


async def test_from_another_host_nobody_operates_without_proof(monkeypatch):
    monkeypatch.setattr("baton.wire.guard.is_local", lambda peer: False)
    async with serving(TlsConfig()) as (worker, address):
        with pytest.raises(LinkBroken, match="from another host"):
            await set_worker_role(address, worker.role)
        with pytest.raises(LinkBroken, match="from another host"):
            await ask_node(address, AskClear())
        assert (await worker_status(address)).worker_id == "w.1"


async def test_the_token_goes_with_calls_that_want_it_only(monkeypatch):
    monkeypatch.setenv("MINE", "a")
    security = secure(TlsConfig(), AccessConfig(token="env:MINE"))
    assert security.metadata("/baton.v1.Worker/Drain") == (("authorization", "Bearer a"),)
    assert security.metadata("/baton.v1.Worker/GetStatus") == ()
    assert "Bearer" not in repr(security)


def test_nobody_listens_or_dials_without_having_chosen(monkeypatch):
    monkeypatch.setattr(transport, "_chosen", None)
    with pytest.raises(RuntimeError, match="secure"):
        channel_to("127.0.0.1:1", Party.WORKER)
    with pytest.raises(RuntimeError, match="secure"):
        transport.new_server()


# --- rotation ----------------------------------------------------------------------------------------


async def test_a_new_certificate_is_shown_without_a_restart(tmp_path):
    """Both sides: the server's port shows the new one, a channel that lasts dials with it."""
    from commands.certificates import Authority

    folder = make_folder(tmp_path / "c")
    async with serving(tls_of(folder)) as (_, address):
        standing = Standing(address, Party.WORKER, pb_grpc.WorkerStub)
        assert await standing.stub.GetStatus(pb.Empty(), timeout=5)
        before = standing.stub
        now = datetime.now(UTC)
        Authority(folder).rotate(days=30, now=now)
        Authority(folder).renew("node", days=1, now=now)
        Authority(folder).renew("operator", days=1, now=now)
        only_new = (folder / "ca.pem").read_bytes().split(b"-----BEGIN")[1]
        key, cert = bytes_of(folder / "operator.key", folder / "operator.pem")
        assert await status_over(raw(address, b"-----BEGIN" + only_new, key, cert))
        assert standing.stub is not before
        assert await standing.stub.GetStatus(pb.Empty(), timeout=5)
        await standing.close()


async def test_files_that_do_not_fit_leave_the_certificate_before(tmp_path, caplog):
    folder = make_folder(tmp_path / "c")
    async with serving(tls_of(folder)) as (_, address):
        good = (folder / "node.key").read_bytes()
        (folder / "node.key").write_bytes((folder / "operator.key").read_bytes())
        os.utime(folder / "node.key", ns=(1, 1))
        with caplog.at_level(logging.WARNING):
            assert await worker_status(address)
            assert await worker_status(address)
        assert [r.getMessage().split(",")[0] for r in caplog.records] == ["certificates as before"]
        (folder / "node.key").write_bytes(good)
        assert await worker_status(address)
    assert "PRIVATE KEY" not in caplog.text


def test_an_end_that_comes_near_is_mentioned_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("baton.wire.identity.WARN_SHARE", 1.0)
    identity = secure(tls_of(make_folder(tmp_path / "c"))).identity
    with caplog.at_level(logging.WARNING):
        identity.current()
        identity.current()
    assert ["renew it before then" in r.getMessage() for r in caplog.records] == [True]


def test_credentials_do_not_show_the_key(folder):
    identity = secure(tls_of(folder)).identity
    assert "PRIVATE" not in repr(identity.current())
