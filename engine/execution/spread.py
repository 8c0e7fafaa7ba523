"""Stages of one worker on several hosts: what the leader knows of the other hosts, and what joins the ranks.

Tensor ranks of a stage share a host and its memory. All else between ranks goes over TCP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import torch

from baton.core.shape import Shape, cores_of_rank
from engine.parallel.mesh import Mesh
from engine.parallel.sockets import SocketGroup

START_SILENCE_S = 20.0
"""A rank that reads its part of the model may be silent for so long. One that serves may not."""
_ADDRESS_BYTES = 512


class FollowerSetup(msgspec.Struct, frozen=True):
    """What a follower's process reads from its standard input."""

    rank: int
    shape: str
    cores: tuple[int, ...]
    """Cores to run on; empty: all that the process has."""
    world_address: str
    orders_address: str
    model: str
    """`ModelConfig` as JSON."""
    engine: str
    """`EngineConfig` as JSON."""
    is_spread: bool = False
    """The ranks are on several hosts."""
    tls: str = ""
    """`TlsConfig` as JSON, where the rank connects to others over TCP; empty: it does not."""
    experts: str = ""
    """`ExpertAccess` as JSON; empty: the rank holds its part of all experts."""


class StageHost(Protocol):
    """Another host, which runs the followers of one stage. Calls come from the team's threads."""

    def start(self, setups: Sequence[FollowerSetup]) -> None:
        """Start the followers without waiting for them. Cores that are not named are shared out there."""
        ...

    def ended(self) -> str:
        """Why a follower or the host has ended; empty: none has. It does not wait."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait for the followers' end, and kill those that take longer. Idempotent."""
        ...


class Reach(NamedTuple):
    """How other hosts reach the leader."""

    listen: str
    """The address to listen on, which may mean all interfaces."""
    reached_at: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the stages of a worker are."""

    reach: Reach
    hosts: tuple[StageHost | None, ...]
    """The host of each stage; None: the leader's own."""

    @property
    def has_others(self) -> bool:
        return any(host is not None for host in self.hosts)

    def host_of(self, shape: Shape, rank: int) -> StageHost | None:
        return self.hosts[shape.position(rank).stage]

    def local_ranks(self, shape: Shape) -> tuple[int, ...]:
        """The ranks of the leader's host."""
        return tuple(rank for rank in range(shape.rank_count) if self.host_of(shape, rank) is None)


def on_this_host(shape: Shape, spread: Spread | None) -> tuple[int, ...]:
    return tuple(range(shape.rank_count)) if spread is None else spread.local_ranks(shape)


def cores_on_host(cores: Sequence[int], rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The cores of one of the ranks of a host."""
    return cores_of_rank(cores, ranks.index(rank), len(ranks))


def begin_mesh(size: int, reach: Reach, *, is_star: bool = False) -> Mesh:
    """As the leader. Raises SetupError."""
    return Mesh.create(
        size,
        host=reach.listen,
        reached_at=reach.reached_at,
        silence_s=START_SILENCE_S,
        is_star=is_star,
    )


def join_mesh(address: str, rank: int, *, is_star: bool = False) -> Mesh:
    """As a follower. Raises SetupError."""
    return Mesh.join(address, rank, silence_s=START_SILENCE_S, is_star=is_star)


def another_group(world: SocketGroup, reach: Reach | None, *, deadline_s: float) -> SocketGroup:
    """A second group of the same ranks. All call it at the same time; `reach` is the leader's. Raises
    SetupError, GroupBroken."""
    address, mesh = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8), None
    if reach is not None:
        mesh = begin_mesh(world.size, reach)
        text = mesh.address.encode()
        address[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    world.broadcast_(address)
    if mesh is None:
        mesh = join_mesh(bytes(address.tolist()).rstrip(b"\0").decode(), world.rank)
    group = SocketGroup(mesh, deadline_s=deadline_s)
    group.wait_for_all(timeout_s=deadline_s)
    return group
