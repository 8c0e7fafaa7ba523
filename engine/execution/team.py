"""The ranks of one worker as processes: the leader's side.

The leader starts a process for each follower, and they read their parts of the model at the same time. From
then on every plan goes to the followers before the leader executes it. Ranks end together: a follower that
dies or fails is noticed at once, and is reported as the loss of the worker.
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, MutableSequence
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig, ModelConfig, TlsConfig
from baton.core.errors import SetupError
from baton.core.messages import AdapterRef
from baton.core.shape import Shape
from baton.wire.transport import chosen
from engine.execution.follower_process import how_ended, start_follower
from engine.execution.load_ranks import claim_device, on_device
from engine.execution.ranks import LEADER, Ranks
from engine.execution.spread import (
    FollowerSetup,
    Reach,
    Spread,
    StageHost,
    another_group,
    begin_mesh,
    cores_on_host,
    on_this_host,
)
from engine.experts.access import ExpertAccess
from engine.kv.generations import NotedGenerations
from engine.kv.pool import KVPool
from engine.parallel.collectives import collectives_of
from engine.parallel.group import Group, GroupBroken, broadcast_address
from engine.parallel.order_channel import OrderSender
from engine.parallel.order_stream import OrderStreamSender
from engine.parallel.orders import (
    FollowerReady,
    FollowerReport,
    RaiseGenerations,
    RankOrder,
    ReadAdapter,
)
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.sockets import SocketGroup
from engine.parallel.team_state import AdapterFailed, TeamState
from engine.parallel.torch_group import ControlGroup, TorchGroup

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""The longest time for a follower's process to start and load its libraries."""
START_LOOK_S = 0.1
READY_S = 1800.0
"""The longest time for a follower to read its part of the model after that."""
ADAPTER_S = 60.0
"""The longest time for a follower to read its part of an adapter."""
LOOK_S = 60.0
"""Reports are waited for in pieces of this length. A piece has to be longer than a rank may be stopped: each
wait begins anew to count that time. `close` ends the wait under way."""
END_S = 3.0
"""The time for followers to end by themselves."""
CONNECT_S = 60.0
"""The longest time for torch.distributed to connect ranks that all have joined."""
PARKED_S = 86_400.0
"""The longest time for which ranks wait for one whose rows no expert rank can take."""
LOOPBACK = "127.0.0.1"
Launch = Callable[[FollowerSetup], "subprocess.Popen[bytes]"]
"""Starts the process of a follower of this host."""


def patient(engine: EngineConfig, *, has_expert_ranks: bool) -> EngineConfig:
    """Return the settings by which the ranks of a worker wait for one another. One that is parked computes
    nothing, which is no fault of its: only `engine.step_timeout_s`, which does not count such a time, ends a
    step of ranks that hang. The end of a rank's process is noticed at once, whatever the settings."""
    return engine.model_copy(update={"rank_timeout_s": PARKED_S}) if has_expert_ranks else engine


def launch_follower(setup: FollowerSetup) -> "subprocess.Popen[bytes]":
    return start_follower(msgspec.json.encode(setup))


def place_of(
    world: SharedMemoryGroup | SocketGroup,
    shape: Shape,
    rank: int,
    engine: EngineConfig,
    device: torch.device,
    *,
    reach: Reach | None = None,
) -> Ranks:
    """Make a rank's groups: here it is chosen what carries its tensors. All ranks call it at the same time.
    `reach` belongs to a leader with ranks on several hosts. Raises SetupError, GroupBroken."""
    ranks = range(shape.rank_count)
    far_s, is_torch = stage_timeout_s(engine), collectives_of(engine.collectives, device.type) == "torch"
    tensor_sets = {shape.tensor_group(one) for one in ranks}
    if is_torch:
        # A device's deadline covers all that it has to do in a step.
        near_s = engine.rank_timeout_s if device.type == "cpu" else far_s
        control = _own_group(world, tensor_sets, rank, near_s, is_new=True)
        tensor = None if control is None else _over_torch(control, device, LOOPBACK, near_s)
    else:
        tensor = _own_group(world, tensor_sets, rank, engine.rank_timeout_s)
    context = _own_group(world, {shape.context_group(one) for one in ranks}, rank, far_s)
    if shape.pipeline == 1:
        return Ranks(shape, rank, world, tensor, context, world)
    results, stages = _all_again(world, rank, reach, far_s), world
    if is_torch:
        host = world.host if isinstance(world, SocketGroup) else LOOPBACK
        stages = _over_torch(_all_again(world, rank, reach, far_s), device, host, far_s)
    return Ranks(shape, rank, world, tensor, context, results, stages)


def _own_group(
    world: Group, sets: set[tuple[int, ...]], rank: int, deadline_s: float, *, is_new: bool = False
) -> SharedMemoryGroup | None:
    """Make the groups of ranks that these sets are, and return this rank's; None if it would be alone. The
    world may be one of them, unless `is_new`."""
    if all(len(members) == 1 for members in sets):
        return None
    if len(sets) == 1 and not is_new:
        assert isinstance(world, SharedMemoryGroup)  # tensor and context ranks of several hosts are in stages
        return world
    groups = [_joined(world, members, rank, deadline_s) for members in sorted(sets)]
    return next(group for group in groups if group is not None)


def _all_again(
    world: SharedMemoryGroup | SocketGroup, rank: int, reach: Reach | None, deadline_s: float
) -> SharedMemoryGroup | SocketGroup:
    """Another group of all ranks."""
    if isinstance(world, SocketGroup):
        return another_group(world, reach, deadline_s=deadline_s)
    group = _joined(world, tuple(range(world.size)), rank, deadline_s)
    assert group is not None
    return group


def _over_torch(control: ControlGroup, device: torch.device, host: str, deadline_s: float) -> TorchGroup:
    group = TorchGroup(control, device=device, host=host, deadline_s=deadline_s)
    try:
        group.connect(timeout_s=CONNECT_S)
    except BaseException:
        group.close()
        raise
    return group


def stage_timeout_s(engine: EngineConfig) -> float:
    """A stage waits for the whole step of another one, and a context rank for the tokens of another one."""
    return engine.step_timeout_s + engine.rank_timeout_s


def world_timeout_s(shape: Shape, engine: EngineConfig) -> float:
    """Tensor ranks are never far apart."""
    return engine.rank_timeout_s if shape.pipeline == shape.context == 1 else stage_timeout_s(engine)


def _joined(world: Group, members: tuple[int, ...], rank: int, deadline_s: float) -> SharedMemoryGroup | None:
    """A group of some ranks, which the first one makes; None for the others."""
    made = None
    if rank == members[0]:
        made = SharedMemoryGroup.create(len(members), deadline_s=deadline_s)
    address = broadcast_address(world, "" if made is None else made.address, source=members[0])
    if rank not in members:
        return None
    if made is None:
        made = SharedMemoryGroup.join(address, members.index(rank), deadline_s=deadline_s)
    made.wait_for_all(
        timeout_s=min(deadline_s, JOIN_S)
    )  # it counts the cores of all, and with them how long a wait spins
    return made


def _begun(
    shape: Shape, engine: EngineConfig, spread: Spread | None
) -> tuple[SharedMemoryGroup | SocketGroup, OrderSender | OrderStreamSender]:
    """Make what the ranks share, as the leader. Nothing is left of it after a failure, nor on other hosts.
    Raises SetupError."""
    count, deadline_s = shape.rank_count, world_timeout_s(shape, engine)
    with contextlib.ExitStack() as begun:
        for host in _other_hosts(spread):
            begun.callback(host.close, 0.0)
        if spread is None:
            world = SharedMemoryGroup.create(count, deadline_s=deadline_s)
            begun.callback(world.close)
            orders = OrderSender.create(count, deadline_s=engine.rank_timeout_s)
        else:
            world = SocketGroup(begin_mesh(count, spread.reach), deadline_s=deadline_s)
            begun.callback(world.close)
            star = begin_mesh(count, spread.reach, is_star=True)
            orders = OrderStreamSender(star, deadline_s=engine.rank_timeout_s)
        begun.pop_all()
    return world, orders


def _other_hosts(spread: Spread | None) -> list[StageHost]:
    return [host for host in spread.hosts if host is not None] if spread is not None else []


class RankTeam:
    """The followers of one worker, and the way to them. `start` and `close` belong to one thread that lives
    as long as the worker: the kernel kills the followers when it ends."""

    def __init__(
        self,
        shape: Shape,
        world: SharedMemoryGroup | SocketGroup,
        orders: OrderSender | OrderStreamSender,
        spread: Spread | None,
        launch: Launch | None = None,
    ) -> None:
        self._shape, self._world, self._orders, self._spread = shape, world, orders, spread
        self._launch = launch
        self._local = on_this_host(shape, spread)
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._state = TeamState(shape.rank_count)
        self._on_lost: Callable[[str], None] | None = None
        self._generations: NotedGenerations | None = None
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self.ranks: Ranks

    @classmethod
    def start(
        cls,
        shape: Shape,
        model: ModelConfig,
        engine: EngineConfig,
        spread: Spread | None = None,
        launch: Launch | None = None,
        access: ExpertAccess | None = None,
    ) -> "RankTeam":
        """Start the followers' processes and wait until all have joined. Stages are on this host, or where
        `spread` says. `launch` starts followers of this host that the worker has parts of its KV in. `access`
        is that of the leader to expert ranks, if there are any. Raises SetupError, and GroupBroken if one of
        them does not get so far."""
        spread = spread if spread is not None and spread.has_others else None
        waiting = patient(engine, has_expert_ranks=access is not None)
        world, orders = _begun(shape, waiting, spread)
        team, joined = cls(shape, world, orders, spread, launch), threading.Event()
        watcher = threading.Thread(target=team._watch_start, args=(joined,), name="ranks-start", daemon=True)
        try:
            team._spawn_all(model, engine, access)
            watcher.start()
            world.wait_for_all(timeout_s=JOIN_S)
            orders.wait_for_all(timeout_s=JOIN_S)
            device, reach = claim_device(on_device(model, 0)), spread.reach if spread else None
            team.ranks = place_of(world, shape, LEADER, waiting, device, reach=reach)
        except BaseException:
            joined.set()
            team.close()
            raise
        joined.set()
        team._listener.start()
        return team

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the followers of this host, by rank."""
        return tuple(process.pid for process in self._processes)

    def pin(self) -> None:
        """Keep the calling thread, which executes the leader's part, on the leader's share of the cores."""
        os.sched_setaffinity(0, cores_on_host(self._cores, LEADER, self._local))

    @property
    def has_remote_parts(self) -> bool:
        """Whether other processes have KV that this one does not map."""
        return self._spread is not None or self._launch is not None

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, the leader included."""
        return self._local

    def wait_ready(self) -> dict[int, FollowerReady]:
        """Wait until every follower can execute plans. Raises the first one's reason: SetupError if somebody
        must change something, else GroupBroken, and another start may do better."""
        state = self._state
        with self._changed:
            self._changed.wait_for(lambda: state.end_reason or state.is_ready, READY_S)
            if state.end_reason:
                raise (SetupError if state.is_setup else GroupBroken)(state.end_reason)
            if state.late:
                raise SetupError(f"rank {state.late[0]} has not read its part of the model in {READY_S:g} s")
            ready = dict(state.ready)
        self._orders.be_strict()
        self.ranks.be_strict()
        return ready

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` once when the ranks have ended without `close`. Any thread may do it."""
        with self._changed:
            self._on_lost = on_lost
            reason = self._state.end_reason
        if reason:
            on_lost(reason)

    def noted(self, generations: npt.NDArray[np.uint64]) -> MutableSequence[int]:
        """The leader's table, for whoever gives blocks out. Where ranks have tables of their own, orders
        bring them the entries that rise."""
        table = cast(MutableSequence[int], generations)
        if self.has_remote_parts:
            table = self._generations = NotedGenerations(generations)
        return table

    def send(self, order: RankOrder) -> None:
        """Raises GroupBroken."""
        risen = self._generations.take() if self._generations is not None else {}
        try:
            if risen:
                self._orders.send(RaiseGenerations(tuple(risen), tuple(risen.values())))
            self._orders.send(order)
        except GroupBroken as error:
            raise GroupBroken(self._state.end_reason or str(error)) from error

    def read_adapter(self, ref: AdapterRef, own_part: Callable[[], None]) -> AdapterFailed | None:
        """Let every rank read its part, this one by `own_part`. One adapter at a time.

        Returns a follower that could not, or not in time. Raises what `own_part` does, and GroupBroken.
        """
        with self._changed:
            self._state.adapter_begins(ref.key)
        self.send(ReadAdapter(ref))
        try:
            own_part()
        finally:
            self._wait_for_adapter()
        with self._changed:
            return self._state.adapter_failed(ADAPTER_S)

    def _wait_for_adapter(self) -> None:
        state = self._state
        with self._changed:
            self._changed.wait_for(lambda: state.end_reason or state.is_adapter_read, ADAPTER_S)
            if state.end_reason:
                raise GroupBroken(state.end_reason)

    def close(self) -> None:
        """End the followers. Idempotent."""
        self._state.is_closing = True
        if hasattr(self, "ranks"):
            self.ranks.close()
        self._world.close()
        self._orders.close()
        end_s = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for host in _other_hosts(self._spread):
            host.close(max(0.0, end_s - time.monotonic()))
        if self._listener.is_alive():
            self._listener.join()

    def _spawn_all(self, model: ModelConfig, engine: EngineConfig, access: ExpertAccess | None) -> None:
        """Raises SetupError, GroupBroken."""
        tls = ""
        if self.has_remote_parts or access is not None:
            identity = chosen().identity
            tls = (identity.config if identity is not None else TlsConfig()).model_dump_json()
        launch = self._launch or launch_follower
        elsewhere: dict[StageHost, list[FollowerSetup]] = {}
        for rank in range(1, self._shape.rank_count):
            host = self._spread.host_of(self._shape, rank) if self._spread is not None else None
            there = elsewhere.setdefault(host, []) if host is not None else []
            number = self._local.index(rank) if host is None else len(there)
            setup = FollowerSetup(
                rank,
                str(self._shape),
                cores_on_host(self._cores, rank, self._local) if host is None else (),
                self._world.address,
                self._orders.address,
                on_device(model, number).model_dump_json(),
                engine.model_dump_json(),
                is_spread=self._spread is not None,
                tls=tls,
                experts=access.of_rank(rank).to_json() if access is not None else "",
            )
            if host is None:
                self._processes.append(launch(setup))
            else:
                there.append(setup)
        for host, setups in elsewhere.items():
            host.start(setups)

    def _watch_start(self, joined: threading.Event) -> None:
        """Notice followers that end before they join: shared memory knows nothing about those."""
        while not joined.wait(START_LOOK_S):
            if lost := next(filter(None, (host.ended() for host in _other_hosts(self._spread))), ""):
                self._world.abort(lost)
                self._orders.abort(lost)
                return
            for rank, process in zip(self._local[1:], self._processes, strict=False):
                if how := how_ended(process):
                    reason = f"rank {rank} (process {process.pid}) {how} while it started"
                    self._world.abort(reason)
                    self._orders.abort(reason)
                    return

    def _listen(self) -> None:
        try:
            while not self._state.is_closing:
                found = self._orders.receive(timeout_s=LOOK_S)
                if found is not None:
                    self._take(*found)
        except GroupBroken as error:
            self._ended(str(error))

    def _take(self, rank: int, report: FollowerReport) -> None:
        with self._changed:
            reason = self._state.reported(rank, report)
            self._changed.notify_all()
        if reason:
            self._ended(reason)

    def _ended(self, reason: str) -> None:
        with self._changed:
            if not self._state.ended(reason):
                return
            on_lost = self._on_lost
            self._changed.notify_all()
        log.error("the ranks of this worker end together: %s", reason)
        self._world.abort(reason)
        self._orders.abort(reason)
        if on_lost is not None:
            on_lost(reason)


def generations_of(pool: KVPool, team: RankTeam | None) -> MutableSequence[int]:
    """The leader's table of generations, through which ranks on other hosts learn what changes in it."""
    return team.noted(pool.generations) if team is not None else cast(MutableSequence[int], pool.generations)
