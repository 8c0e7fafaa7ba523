"""The process of a follower: it reads its rank's part of the model and executes the leader's orders.

`engine.execution.follower_process` starts it, with a `FollowerSetup` as JSON on its standard input. It ends
with its leader, however that ends.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton.config import EngineConfig, ModelConfig, TlsConfig
from baton.core.errors import SetupError
from baton.core.shape import Shape
from baton.core.steps import StepPlan
from baton.wire.parent import end_with_parent
from baton.wire.transport import secure
from engine.execution.executor import Executor
from engine.execution.load_ranks import claim_device
from engine.execution.ranks import Ranks
from engine.execution.spread import FollowerSetup, join_mesh
from engine.execution.team import JOIN_S, patient, place_of, world_timeout_s
from engine.experts.access import ExpertAccess
from engine.loading.adapters import AdapterWeights
from engine.parallel.group import GroupBroken
from engine.parallel.order_channel import OrderReceiver
from engine.parallel.order_stream import OrderStreamReceiver
from engine.parallel.orders import (
    AdapterOrder,
    AdapterRead,
    DropAdapter,
    FollowerFailed,
    FollowerReady,
    InstallAdapter,
    RaiseGenerations,
    ReadAdapter,
)
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.sockets import SocketGroup

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""An order is waited for in pieces of this length. The leader's end is noticed at once."""


class Follower:
    """Carries orders out, in order. Adapters are read beside the steps."""

    def __init__(self, executor: Executor, orders: OrderReceiver | OrderStreamReceiver, ranks: Ranks) -> None:
        self._executor, self._orders, self._ranks = executor, orders, ranks
        self._is_serving = False
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._read: dict[str, AdapterWeights] = {}
        """The adapter that was read last, until it is installed. The leader reads one at a time, and may
        leave it at that."""

    def run(self) -> None:
        """Follow until the leader leaves. Raises GroupBroken then, and what a step raises."""
        while True:
            order = self._orders.receive(timeout_s=LOOK_S)
            if order is not None and not self._is_serving:  # the first one means that all ranks serve
                self._is_serving = True
                self._orders.be_strict()
                self._ranks.be_strict()
            if isinstance(order, StepPlan):
                self._executor.execute(order)
            elif isinstance(order, RaiseGenerations):
                self._executor.kv.raise_generations(order.blocks, order.generations)
            elif order is not None:
                self._change_adapters(order)

    def _change_adapters(self, order: AdapterOrder) -> None:
        slots = self._executor.adapters
        match order:
            case ReadAdapter():
                self._reading.submit(self._read_adapter, order)
            case InstallAdapter(key):
                slots.install(self._read.pop(key))
            case DropAdapter(key):
                self._read.pop(key, None)
                slots.drop(key)

    def _read_adapter(self, order: ReadAdapter) -> None:
        error = ""
        try:
            self._read = {order.ref.key: self._executor.adapters.read(order.ref)}
        except SetupError as raised:
            error = str(raised)
        except Exception as raised:
            log.exception("adapter %s cannot be read", order.ref.name)
            error = f"{type(raised).__name__}: {raised}"
        self._orders.report(AdapterRead(order.ref.key, error))


Beside = Callable[[Executor], contextlib.AbstractContextManager[object]]
"""What a follower's process does beside its orders, from the time when it has its part of the model. It may
raise SetupError."""


def main(parent_pid: int) -> int:
    bind_to(parent_pid)
    return follow(msgspec.json.decode(sys.stdin.buffer.read(), type=FollowerSetup))


def bind_to(parent_pid: int) -> None:
    """Let this process end with its parent, and not before."""
    end_with_parent(parent_pid, signal.SIGKILL)
    # Ctrl-C at a terminal reaches every process of the group. The leader decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow(setup: FollowerSetup, beside: Beside = contextlib.nullcontext) -> int:
    """Be a follower until the leader leaves, and return the exit status."""
    for thread in os.listdir("/proc/self/task") if setup.cores else ():  # libraries may have started some
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), setup.cores)
    logging.basicConfig(format=f"%(asctime)s rank {setup.rank} %(levelname)s %(message)s")
    model = ModelConfig.model_validate_json(setup.model)
    engine = EngineConfig.model_validate_json(setup.engine)
    shape, rank = Shape.parse(setup.shape), setup.rank
    waiting = patient(engine, has_expert_ranks=bool(setup.experts))
    try:
        orders, world = _joined(setup, shape, waiting)
        world.wait_for_all(timeout_s=JOIN_S)
        orders.wait_for_all(timeout_s=JOIN_S)
        ranks = place_of(world, shape, rank, waiting, claim_device(model))
    except (SetupError, GroupBroken) as error:
        log.error("%s", error)
        return 1
    try:
        began_s = time.monotonic()
        access = ExpertAccess.from_json(setup.experts) if setup.experts else None
        executor = Executor.load_part(model, engine, ranks, access)
        with beside(executor):
            orders.report(FollowerReady(executor.kv.address, time.monotonic() - began_s, executor.floor_s))
            Follower(executor, orders, ranks).run()
    except GroupBroken as error:
        log.log(logging.INFO if error.is_farewell else logging.WARNING, "this rank ends: %s", error)
        return 0
    except Exception as error:
        if not isinstance(error, SetupError):
            log.exception("rank %d fails", rank)
        reason = str(error) if isinstance(error, SetupError) else f"{type(error).__name__}: {error}"
        _tell(orders, FollowerFailed(reason, is_setup=isinstance(error, SetupError)))
        world.abort(f"rank {rank} fails: {reason}")
        return 1
    return 0


def _joined(
    setup: FollowerSetup, shape: Shape, engine: EngineConfig
) -> tuple[OrderReceiver | OrderStreamReceiver, SharedMemoryGroup | SocketGroup]:
    """Raises SetupError."""
    rank, deadline_s = setup.rank, world_timeout_s(shape, engine)
    if setup.tls:
        secure(TlsConfig.model_validate_json(setup.tls))
    if not setup.is_spread:
        orders = OrderReceiver.join(setup.orders_address, rank, deadline_s=engine.rank_timeout_s)
        return orders, SharedMemoryGroup.join(setup.world_address, rank, deadline_s=deadline_s)
    world = SocketGroup(join_mesh(setup.world_address, rank), deadline_s=deadline_s)
    star = join_mesh(setup.orders_address, rank, is_star=True)
    return OrderStreamReceiver(star, deadline_s=engine.rank_timeout_s), world


def _tell(orders: OrderReceiver | OrderStreamReceiver, failed: FollowerFailed) -> None:
    try:
        orders.report(failed)
    except GroupBroken as error:
        log.error("%s", error)
