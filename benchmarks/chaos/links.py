"""Links between hosts: every pair has one of its own, so that each can be cut or slowed alone.

Packets are dropped and delayed where they leave a host, by `tc`, so each direction has its own state. What a
sender sees is a network that loses packets, not an interface that is down.
"""

import contextlib
from collections.abc import Awaitable
from itertools import combinations

from baton.core.errors import SetupError
from benchmarks.chaos.namespaces import Host, command

CLIENT = "client"
"""The end of a link in the drill's own namespace, where clients are. These links stay whole, so that what the
clients hear is what was said."""

BLACKHOLE = ("blackhole",)
QUEUE_MS = 400


def slow_by_rate(kbits: float) -> tuple[str, ...]:
    """A small bandwidth, and a queue as slow lines have it."""
    return ("tbf", "rate", f"{kbits:.0f}kbit", "burst", "16kb", "latency", f"{QUEUE_MS}ms")


def slow_by_netem(kbits: float) -> tuple[str, ...]:
    """The same with a delay and a little loss."""
    return ("netem", "rate", f"{kbits:.0f}kbit", "delay", "80ms", "30ms", "loss", "2%")


class HostLinks:
    """The links between all hosts, and from the drill to each."""

    def __init__(self, hosts: dict[str, Host], client_address: str) -> None:
        self._hosts, self._client_address = hosts, client_address
        self._broken: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        """What slows or cuts each direction now; the latest is in effect."""
        self.has_netem = False

    async def start(self) -> None:
        """Raises SetupError."""
        await command("ip", "addr", "add", f"{self._client_address}/32", "dev", "lo")
        for name in self._hosts:
            await self._to_client(name)
        for a, b in combinations(self._hosts, 2):
            await self._between(a, b)
        self.has_netem = await self._try_netem()

    async def restore(self, name: str) -> None:
        """Make the links of a host that was started again. The kernel takes its time with the old ones."""
        await _forget(command("ip", "link", "del", f"to-{name}"))
        await self._to_client(name)
        for other in self._hosts:
            if other != name:
                await _forget(self._hosts[other].command("ip", "link", "del", f"to-{name}"))
                await self._between(*sorted((name, other), key=list(self._hosts).index))
        for (a, b), states in self._broken.items():
            if name in (a, b) and states:
                await self._apply(a, b)

    async def _to_client(self, name: str) -> None:
        host, near = self._hosts[name], f"to-{name}"
        await command(
            "ip", "link", "add", near, "type", "veth", "peer", "name", CLIENT, "netns", str(host.init_pid)
        )
        await command("ip", "link", "set", near, "up")
        await host.command("ip", "link", "set", CLIENT, "up")
        await command("ip", "route", "add", f"{host.address}/32", "dev", near, "src", self._client_address)
        await host.command(
            "ip", "route", "add", f"{self._client_address}/32", "dev", CLIENT, "src", host.address
        )

    async def _between(self, a: str, b: str) -> None:
        one, two = self._hosts[a], self._hosts[b]
        peer = ("type", "veth", "peer", "name", f"to-{a}", "netns", str(two.init_pid))
        await command("ip", "link", "add", f"to-{b}", "netns", str(one.init_pid), *peer)
        for here, there, name in ((one, two, b), (two, one, a)):
            await here.command("ip", "link", "set", f"to-{name}", "up")
            route = ("ip", "route", "add", f"{there.address}/32", "dev", f"to-{name}", "src", here.address)
            await here.command(*route)

    async def _try_netem(self) -> bool:
        device = f"to-{next(iter(self._hosts))}"
        try:
            await command("tc", "qdisc", "replace", "dev", device, "root", "netem", "delay", "1ms")
        except SetupError:
            return False
        await command("tc", "qdisc", "del", "dev", device, "root")
        return True

    async def break_(self, a: str, b: str, how: tuple[str, ...]) -> None:
        """Cut or slow the direction from `a` to `b`."""
        self._broken.setdefault((a, b), []).append(how)
        await self._apply(a, b)

    async def mend(self, a: str, b: str, how: tuple[str, ...]) -> None:
        """Take back what `break_` did."""
        self._broken[a, b].remove(how)
        await self._apply(a, b)

    async def mend_all(self) -> None:
        for a, b in self._broken:
            self._broken[a, b].clear()
            await self._apply(a, b)

    async def _apply(self, a: str, b: str) -> None:
        """A host that is away gets its state when it is back, by `restore`."""
        host, states = self._hosts[a], self._broken[a, b]
        how = states[-1] if states else ("noqueue",)
        if not (host.is_up and self._hosts[b].is_up):
            return
        await host.command("tc", "qdisc", "replace", "dev", f"to-{b}", "root", *how)

    def slow(self, kbits: float) -> tuple[str, ...]:
        """The means that this kernel has."""
        return slow_by_netem(kbits) if self.has_netem else slow_by_rate(kbits)


async def _forget(deletion: Awaitable[str]) -> None:
    """Delete a link that may be gone already."""
    with contextlib.suppress(SetupError):
        await deletion
