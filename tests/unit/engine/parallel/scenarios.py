"""What the ranks do in `rank_processes`. Each function is one rank's life."""

import hashlib
import json
import os
import signal
import traceback

import pytest
import torch

from engine.parallel.group import GroupBroken
from engine.parallel.mesh import Mesh
from engine.parallel.order_channel import OrderReceiver, OrderSender
from engine.parallel.order_stream import OrderStreamReceiver, OrderStreamSender
from engine.parallel.orders import FollowerFailed, FollowerReady
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.sockets import SocketGroup
from engine.parallel.torch_group import TorchGroup
from tests.faulty_group import FaultyGroup, GroupFault, GroupFaultPlan
from tests.unit.engine.parallel.plans import plan
from tests.unit.engine.parallel.rank_processes import Teller, traces

SIZES = (1, 2, 3, 15, 16, 17, 31, 63, 1000, 8191, 8192, 32768, 70_001, 400_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _join(teller, rank, size, address, deadline_s, carrier="memory", **sizes):
    if carrier == "sockets":
        mesh = (
            Mesh.join(address, rank) if rank else Mesh.create(size, host="127.0.0.1", reached_at="127.0.0.1")
        )
        if not rank:
            teller.tell(address=mesh.address)
        return SocketGroup(mesh, deadline_s=deadline_s)
    if rank:
        group = SharedMemoryGroup.join(address, rank, deadline_s=deadline_s)
    else:
        group = SharedMemoryGroup.create(size, deadline_s=deadline_s, **sizes)
        teller.tell(address=group.address)
    if carrier == "torch":
        return TorchGroup(group, device=torch.device("cpu"), host="127.0.0.1", deadline_s=deadline_s)
    return group


def all_calls(group, round_number):
    """One of each kind of call, on a few sizes; a digest of all that came out."""
    digest = hashlib.sha256()

    def add(x):
        digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())

    for dtype in DTYPES:
        for count in SIZES:
            generator = torch.Generator().manual_seed(1000 * round_number + group.rank)
            x = torch.randn(count, generator=generator).to(dtype)
            add(group.all_reduce_(x))
            add(group.broadcast_(x, source=group.size - 1))
    lengths = [17 * rank for rank in range(1, group.size + 1)]
    add(group.all_gather(torch.full((40, lengths[group.rank]), float(group.rank)), 1, sizes=lengths))
    rows = group.reduce_scatter(torch.full((5 * group.size, 30), float(group.rank + round_number)))
    add(group.all_gather(rows))
    return digest.hexdigest()


def bits(teller, rank, size, address, rounds, carrier):
    group = _join(teller, rank, size, address, 60.0, carrier)
    group.wait_for_all(timeout_s=60.0)
    digests = [all_calls(group, 7) for _ in range(rounds)]
    group.close()
    teller.tell(result=digests, traces=traces())


def _pass_on(group, x):
    if group.rank:
        group.recv(x.shape, x.dtype, group.rank - 1)
    group.send(x, (group.rank + 1) % group.size)
    if not group.rank:
        group.recv(x.shape, x.dtype, group.size - 1)


LOOPS = {
    "all_reduce": lambda group, x: group.all_reduce_(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "gather": lambda group, x: group.gather(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x, sizes=[x.shape[0], *[0] * (group.size - 1)]),
    "broadcast": lambda group, x: group.broadcast_(x),
    "messages": _pass_on,
}


def loop(teller, rank, size, address, call, count, deadline_s, carrier):
    """Calls until the group breaks."""
    group = _join(teller, rank, size, address, deadline_s, carrier, ring_bytes=64 * 1024)
    try:
        group.wait_for_all(timeout_s=60.0)
        x = torch.zeros(count)
        LOOPS[call](group, x)
        teller.at_work()
        while True:
            LOOPS[call](group, x)
    except GroupBroken as error:
        _tell_broken(teller, group, error)


def _tell_broken(teller, group, error):
    again = ""
    try:
        group.all_reduce_(torch.zeros(1))
    except GroupBroken as later:
        again = str(later)
    group.close()
    teller.tell(broken=str(error), again=again, traces=traces())


def faulty(teller, rank, size, address, seed, kill_at, deadline_s, carrier):
    """Calls through a group that misbehaves, until it breaks."""
    inner = _join(teller, rank, size, address, deadline_s, carrier)
    script = (*[GroupFault.NONE] * kill_at, GroupFault.KILL) if rank == size - 1 and kill_at >= 0 else ()
    group = FaultyGroup(inner, GroupFaultPlan(seed=seed, probability=0.02, script=script, delay_s=0.001))
    x = torch.ones(5000)
    try:
        inner.wait_for_all(timeout_s=60.0)  # A rank may be gone before the last of the others knows of all.
        while True:
            group.all_reduce_(x.fill_(rank + 1.0))
            total = size * (size + 1) / 2
            assert x.min() == x.max() == total, "a wrong sum"
            assert group.all_gather(torch.full((3,), float(rank))).sum() == 3 * size * (size - 1) / 2
    except GroupBroken as error:
        _tell_broken(teller, group, error)


def never_joins(teller, rank, size, address, deadline_s, carrier):
    """Rank 1 dies before it joins."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group = _join(teller, rank, size, address, deadline_s, carrier)
    try:
        group.wait_for_all(timeout_s=deadline_s)
    except GroupBroken as error:
        _tell_broken(teller, group, error)


def _channel(rank, size, address, deadline_s, carrier, plan_bytes):
    """A rank's end of the orders."""
    if carrier == "sockets":
        if rank:
            return OrderStreamReceiver(Mesh.join(address, rank, is_star=True), deadline_s=deadline_s)
        mesh = Mesh.create(size, host="127.0.0.1", reached_at="127.0.0.1", is_star=True)
        return OrderStreamSender(mesh, deadline_s=deadline_s)
    if rank:
        return OrderReceiver.join(address, rank, deadline_s=deadline_s)
    return OrderSender.create(size, deadline_s=deadline_s, plan_bytes=plan_bytes)


def plans(teller, rank, size, address, rounds, items, carrier):
    """The leader sends plans, all followers get them, and answer."""
    if rank:
        channel = _channel(rank, size, address, 60.0, carrier, 0)
        channel.wait_for_all(timeout_s=60.0)
        channel.report(FollowerReady(""))
        wrong = sum(channel.receive(timeout_s=60.0) != plan(i, items) for i in range(rounds))
        channel.report(FollowerFailed(f"rank {rank} has had {wrong} wrong plans"))
        with pytest.raises(GroupBroken):  # one that left now would end the channel for those that still read
            channel.receive(timeout_s=60.0)
        channel.close()
        teller.tell(result=wrong, traces=traces())
        return
    leader = _channel(rank, size, address, 60.0, carrier, 64 * 1024)
    teller.tell(address=leader.address)
    leader.wait_for_all(timeout_s=60.0)
    for i in range(rounds):
        leader.send(plan(i, items))
    reports = []
    while len(reports) < 2 * (size - 1):
        from_rank, report = leader.receive(timeout_s=60.0)
        reports.append([from_rank, report.reason if isinstance(report, FollowerFailed) else "ready"])
    leader.close()
    teller.tell(result=sorted(reports), traces=traces())


def plan_loop(teller, rank, size, address, deadline_s, carrier):
    """Plans until the channel breaks."""
    channel = _channel(rank, size, address, deadline_s, carrier, 16 * 1024)
    if not rank:
        teller.tell(address=channel.address)
    try:
        channel.wait_for_all(timeout_s=60.0)
        teller.at_work()
        number = 0
        while True:
            if rank:
                channel.receive(timeout_s=deadline_s)
                channel.report(FollowerReady(""))
            else:
                channel.send(plan(number, 4))
                number += 1
                channel.receive(timeout_s=deadline_s)
    except GroupBroken as error:
        channel.close()
        teller.tell(broken=str(error), traces=traces())


def be_rank(name, place, options):
    torch.set_num_threads(1)
    teller = Teller()
    try:
        globals()[name](teller, *json.loads(place), **json.loads(options))
    except Exception:
        teller.tell(error=traceback.format_exc())
