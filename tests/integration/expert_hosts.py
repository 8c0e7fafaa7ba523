"""Expert ranks on two hosts: rows travel over TCP with TLS, and a host is cut off and lost.

`python -m tests.integration.expert_hosts FOLDER MODEL` prints what it saw as a line of JSON. There are two
clusters: one worker whose experts are on two ranks, and two workers with a rank beside each.
"""

import os
import random
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertGroupState, ExpertRankPhase
from baton.wire import peer_sockets
from baton.wire.client import worker_status
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from tests.integration.ray_hosts import CONTROL, WAIT_S, RayHosts, Streams, complete, drill_main

PLACES = ("b", "c")
PROMPTS = [[3 + (11 * n + k) % 90 for k in range(20 + 50 * n)] for n in range(3)]
STREAMED = 300
"""Tokens of a stream that a fault meets."""
RANK, WORKER = "expert rank", "leader"
LISTENS = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
SETTINGS = {"experts__replicas": 2, "experts__rebalance_s": 5, "experts__threads": 1}


class ExpertHosts:
    """The group of a cluster that runs on the hosts."""

    def __init__(self, hosts: RayHosts, client: httpx.AsyncClient) -> None:
        self.hosts, self._client = hosts, client
        self._operator = OperateClient(CONTROL)

    async def group(self) -> ExpertGroupState | None:
        try:
            groups = (await self._operator.state()).experts
        except LinkBroken:  # it is starting
            return None
        return groups[0] if groups else None

    async def until(self, what: str, holds: Callable[[ExpertGroupState], bool]) -> ExpertGroupState:
        """Raises TimeoutError."""
        group: ExpertGroupState | None = None
        for _ in range(int(WAIT_S / 0.3)):
            group = await self.group()
            if group is not None and holds(group):
                return group
            await self.hosts.pause(0.3)
        raise TimeoutError(f"not in time: {what}; {group}; {self.hosts.kinds()}")

    async def until_strong(self) -> ExpertGroupState:
        return await self.until("all ranks are ready, and every expert is on both", is_strong)

    async def tokens(self) -> list[list[int]]:
        return [await complete(self._client, self.hosts.url, prompt, 24) for prompt in PROMPTS]

    async def workers(self, count: int) -> list[str]:
        """Addresses of the workers that the router has a session with, as soon as there are `count`.

        The router is ready with the first of them. Raises TimeoutError.
        """
        for _ in range(int(WAIT_S / 0.3)):
            listed = (await self._client.get(f"{self.hosts.url}/health")).json()["workers"]
            found = [worker["address"] for those in listed.values() for worker in those]
            if len(found) == count:
                return found
            await self.hosts.pause(0.3)
        raise TimeoutError(f"not in time: the router has sessions with {count} workers")

    async def accounts(self, count: int) -> list[dict[str, float]]:
        """What each worker says of the rows that it sent."""
        return [dict((await worker_status(address)).accounts) for address in await self.workers(count)]

    async def close(self) -> None:
        await self._operator.close()


def is_strong(group: ExpertGroupState) -> bool:
    ready = [rank for rank in group.ranks if rank.phase is ExpertRankPhase.READY]
    return len(ready) == group.wanted_ranks == 2 and group.replicas_min == 2 and not group.loads_running


def rows(group: ExpertGroupState) -> dict[str, int]:
    """Rows that ranks computed, by host."""
    return {rank.host: rank.rows for rank in group.ranks}


def place_of(kinds: dict[str, list[str]], *, has_worker: bool) -> str:
    return next(name for name, those in kinds.items() if (WORKER in those) is has_worker)


def doors(hosts: RayHosts) -> list[tuple[str, int]]:
    """Addresses at which expert ranks listen for callers of other hosts."""
    return [
        (hosts.hosts[name].address, port)
        for name, kind, process in hosts.processes()
        if kind == RANK
        for port in listening_ports(process.pid)
    ]


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens on all interfaces, in whatever network namespace it is."""
    opened = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found: list[int] = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].partition(":")
        if words[3] == LISTENS and host == "00000000" and f"socket:[{words[9]}]" in opened:
            found.append(int(port, 16))
    return found


def knock(address: tuple[str, int]) -> dict[str, Any]:
    """What the door says to a worker that knows no secret, and to one without a certificate."""
    said: dict[str, Any] = {}
    with socket.create_connection(address, 5) as plain:
        plain.settimeout(5)
        plain.sendall(random.Random(1).randbytes(300))
        try:
            answer = plain.recv(100)
            while answer and not answer.startswith(b"\x15"):  # a TLS alert may come before the end
                answer = plain.recv(100)
            said["plain"] = len(answer)
        except ConnectionError:
            said["plain"] = 0
    try:
        with peer_sockets.connect(*address, timeout_s=5) as secured:
            assert isinstance(secured, ssl.SSLSocket)
            said["tls"] = secured.version()
            secured.sendall(b"\x02\x00\x00\x00{}")
            said["greeting"] = len(secured.recv(100))
    except (OSError, PeerFailure) as error:
        said["tls"] = str(error)
    return said


async def on_ranks(hosts: RayHosts, experts: ExpertHosts, report: dict[str, Any]) -> None:
    """A worker, and two ranks: the one on another host is cut off while streams run."""
    await hosts.start_cluster("--aggregated", "1", experts__parallel="ranks", experts__ranks=2, **SETTINGS)
    report["placed"] = placed = await hosts.await_placed([WORKER, RANK, RANK])
    before = await experts.until_strong()
    report["knocked"] = [knock(address) for address in doors(hosts)]
    report["tokens"] = await experts.tokens()
    report["rows"] = rows(await experts.until("rows are counted", lambda group: all(rows(group).values())))
    report["accounts"] = await experts.accounts(1)
    far = place_of(placed, has_worker=False)
    async with httpx.AsyncClient(timeout=240) as client:
        streams = Streams(client, hosts.url, PROMPTS, STREAMED)
        await streams.begin()
        report["under_way"] = streams.under_way
        await hosts.cut(far)
        await experts.until("it is lost", lambda group: group.losses > before.losses)
        report["streamed"] = await streams.tokens()
    await hosts.links.mend_all()
    healed = await experts.until_strong()
    report["losses"] = healed.losses - before.losses
    report["tokens_after"] = await experts.tokens()
    report["left"] = await hosts.stop_cluster()


async def beside_workers(hosts: RayHosts, experts: ExpertHosts, report: dict[str, Any]) -> None:
    """Two workers, and a rank beside each: a host is lost while streams run."""
    await hosts.start_cluster("--aggregated", "2", experts__parallel="workers", **SETTINGS)
    report["placed"] = await hosts.await_placed([WORKER, RANK] * 2)
    before = await experts.until_strong()
    await experts.workers(2)
    report["tokens"] = await experts.tokens()
    report["rows"] = rows(await experts.until("rows are counted", lambda group: all(rows(group).values())))
    report["accounts"] = await experts.accounts(2)
    async with httpx.AsyncClient(timeout=240) as client:
        streams = Streams(client, hosts.url, PROMPTS, STREAMED)
        await streams.begin()
        report["under_way"] = streams.under_way
        await hosts.lose(PLACES[1])
        report["streamed"] = await streams.tokens()
    report["placed_again"] = await hosts.await_placed([WORKER, RANK] * 2, without=PLACES[1])
    report["losses"] = (await experts.until_strong()).losses - before.losses
    report["tokens_after"] = await experts.tokens()
    report["left"] = await hosts.stop_cluster()


async def drill(hosts: RayHosts, report: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=240) as client:
        for name, part in (("ranks", on_ranks), ("workers", beside_workers)):
            experts = ExpertHosts(hosts, client)
            await part(hosts, experts, report.setdefault(name, {}))
            await experts.close()
            hosts.note(name)


def make(folder: Path, model: str) -> RayHosts:
    return RayHosts(folder, model, PLACES, cpus=4)


if __name__ == "__main__":
    sys.exit(drill_main("tests.integration.expert_hosts", drill, make))
