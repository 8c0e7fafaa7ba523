"""Several Redis servers that are one: a cluster, or a master with its replica and sentinel. And TLS."""

import asyncio
import os
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.contract.redis_servers import RedisServer
from tests.ports import free_port

SLOTS = 16_384
PATIENCE_S = 30.0


def client(port):
    return Redis(port=port, decode_responses=True)


def until(condition):
    """Other processes agree by gossip: they can only be asked until they have."""
    end = os.times().elapsed + PATIENCE_S
    while os.times().elapsed < end:
        with suppress(RedisError, KeyError):
            if condition():
                return
    raise AssertionError("not in time")


def is_whole(server):
    return server.cluster("INFO")["cluster_state"] == "ok"


def follows(server):
    return server.info("replication")["master_link_status"] == "up"


@contextmanager
def redis_cluster(folder, count=3):
    """Masters without replicas, the slots spread evenly; yields the servers."""
    servers = []
    for index in range(count):
        own = folder / str(index)
        own.mkdir()
        on = ["--cluster-enabled", "yes", "--cluster-node-timeout", 2000]
        servers.append(RedisServer(own, *on, port=free_port(twin=10_000)).start())
    try:
        for index, server in enumerate(servers):
            own = client(server.port)
            own.execute_command(
                "CLUSTER ADDSLOTS", *range(SLOTS * index // count, SLOTS * (index + 1) // count)
            )
            own.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)
        for server in servers:
            until(partial(is_whole, client(server.port)))
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextmanager
def sentinel_group(folder):
    """A master, a replica that has joined it, and one sentinel that may act alone; yields all three."""
    folders = [folder / name for name in ("master", "replica", "sentinel")]
    for own in folders:
        own.mkdir()
    master = RedisServer(folders[0], port=free_port()).start()
    replica = RedisServer(folders[1], "--replicaof", "127.0.0.1", master.port, port=free_port())
    config = f"""
        port {(port := free_port())}
        dir {folders[2]}
        sentinel monitor them 127.0.0.1 {master.port} 1
        sentinel down-after-milliseconds them 300
        sentinel failover-timeout them 2000
    """
    sentinel = RedisServer(folders[2], port=port, config=config)
    try:
        replica.start()
        until(partial(follows, client(replica.port)))
        sentinel.start()
        until(partial(client(port).sentinel_slaves, "them"))
        yield master, replica, sentinel
    finally:
        for server in (sentinel, replica, master):
            server.kill()


@contextmanager
def certificates(folder):
    """ca.pem, and server.pem and client.pem signed by it, keys included. For 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def run(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    run(*new, "-x509", "-subj", "/CN=test ca", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        run(*sign, "-extfile", "names", "-out", f"{name}.crt", "-days", "2")
        (folder / f"{name}.pem").write_text(
            (folder / f"{name}.crt").read_text() + (folder / f"{name}.key").read_text()
        )
    yield folder


@asynccontextmanager
async def tls_before(socket_path, folder):
    """What rediss:// talks to where the server was built without TLS; it wants the client's certificate.
    Yields the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader, writer):
        with suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader, writer):
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket_path)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
