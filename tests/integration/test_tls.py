"""A whole cluster with mutual TLS: it serves, and its ports answer nobody without a certificate."""

import socket
import ssl
from contextlib import contextmanager
from datetime import UTC, datetime

import grpc
import httpx
import psutil
import pytest

from baton.config import Config
from baton.core.store_admin import AskStatus
from baton.wire.local import ask_store
from baton.wire.parties import Party, name_of
from baton.wire.transport import secure
from tests.certificates import make_folder, tls_environment, tls_of
from tests.integration.cluster import Cluster, bytes_read, loop
from tests.models import make_model

pytest.importorskip("cryptography")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DOMAIN = "baton.internal"
PROMPT = list(range(3, 103))
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from commands.certificates import Authority

    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = make_folder(folder / "ours"), make_folder(folder / "theirs")
    Authority(ours).issue("old", list(Party), domain=DOMAIN, days=-0.1, now=datetime.now(UTC))
    return ours, theirs


@pytest.fixture(scope="module")
def cluster(folders, tmp_path_factory):
    tls = tls_of(folders[0])
    patch = pytest.MonkeyPatch()
    for name, value in tls_environment(tls).items():
        patch.setenv(name, value)
    secure(tls)  # the test accesses it as one of its own processes
    model = make_model(tmp_path_factory.mktemp("model") / "llama", "llama", seed=3)
    settings = {"engine__block_tokens": 16, "engine__kv_bytes": 32 * 2**20, "engine__threads": 1}
    try:
        with Cluster(model, **settings) as running:
            yield running
            running.assert_idle()
    finally:
        patch.undo()
        secure(Config().tls)


def test_a_prompt_is_computed_on_one_worker_and_answered_by_another(cluster):
    cluster.complete(PROMPT, max_tokens=8, ignore_eos=True)
    assert bytes_read(cluster.worker("decode").accounts) > 0


def grpc_addresses(cluster):
    """Addresses by their owners."""
    found = {w.worker_id: w.address for w in cluster.workers()}
    path = next(line for line in cluster.log if "store node of this host starts at" in line).rsplit(" ", 1)[1]
    found["store"] = loop().run(ask_store(path, AskStatus())).address
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        command = process.cmdline()
        if "router" in command:
            found["control"] = command[command.index("--control") + 1]
            ports = listening([process]) - {cluster.port}
            assert len(ports) == 1
            found["router"] = f"127.0.0.1:{ports.pop()}"
    return found


def listening(processes):
    return {
        c.laddr.port for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }


@contextmanager
def channel(address, party, credentials):
    if credentials is None:
        opened = grpc.insecure_channel(address)
    else:
        name = ("grpc.ssl_target_name_override", name_of(party, DOMAIN))
        opened = grpc.secure_channel(address, credentials, options=[name])
    with opened:
        yield opened


def answer(address, party, credentials):
    """The status of a call that no service has. UNIMPLEMENTED means that the caller was let in."""
    with channel(address, party, credentials) as opened, pytest.raises(grpc.RpcError) as caught:
        opened.unary_unary("/baton.v1.Nobody/Says")(b"", timeout=10)
    return caught.value.code()


def credentials(root, name=None, *, own=None):
    pair = (
        [((own or root) / f"{name}.{kind}").read_bytes() for kind in ("key", "pem")] if name else (None, None)
    )
    return grpc.ssl_channel_credentials((root / "ca.pem").read_bytes(), *pair)


def party_of(name):
    return Party(name) if name in ("store", "control", "router") else Party.WORKER


def test_who_is_not_of_this_cluster_is_refused_at_every_grpc_port(cluster, folders):
    ours, theirs = folders
    addresses = grpc_addresses(cluster)
    assert len(addresses) == 5  # two workers, store node, control plane, router
    refused, admitted = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED
    for name, address in addresses.items():
        party = party_of(name)
        assert answer(address, party, credentials(ours, "node")) is admitted, name
        assert answer(address, party, None) is refused, name
        assert answer(address, party, credentials(ours)) is refused, name
        assert answer(address, party, credentials(ours, "node", own=theirs)) is refused, name
        assert answer(address, party, credentials(ours, "old")) is refused, name


def is_http(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wants_a_certificate(port):
    """True if it speaks TLS and closes the connection on clients without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain) as line,
        ):
            line.settimeout(5)
            return line.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True
    except TimeoutError:
        return False


def test_ports_that_want_no_certificate_are_the_documented_ones(cluster):
    """Public API and metrics need no certificate. The data plane and Ray's ports are identified by the
    process that listens."""
    ours = [p for p in psutil.Process(cluster.process.pid).children(recursive=True) if "baton" in p.cmdline()]
    ports = listening([psutil.Process(cluster.process.pid), *ours])
    assert len(ports) >= 5
    for port in ports:
        assert is_http(port) or wants_a_certificate(port), port


def test_no_process_of_the_cluster_can_be_reached_from_another_host(cluster):
    """Not even Ray's ports can be reached, because they would let anybody run anything."""
    root = psutil.Process(cluster.process.pid)
    public = {
        (process.name(), line.laddr.ip, line.laddr.port)
        for process in [root, *root.children(recursive=True)]
        for line in process.net_connections("tcp")
        if line.status == psutil.CONN_LISTEN and line.laddr.ip not in LOOPBACK
    }
    assert not public
