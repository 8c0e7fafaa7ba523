"""Groups whose ranks are threads of the test, whatever carries them."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from engine.parallel.mesh import Mesh
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.parallel.sockets import SocketGroup
from engine.parallel.torch_group import TorchGroup
from tests.local_group import local_groups

DEADLINE_S = 60.0
"""No test comes near it unless it wants to."""


def shared_memory_groups(size, *, deadline_s=DEADLINE_S, **sizes):
    first = SharedMemoryGroup.create(size, deadline_s=deadline_s, **sizes)
    return [first] + [
        SharedMemoryGroup.join(first.address, rank, deadline_s=deadline_s) for rank in range(1, size)
    ]


def socket_groups(size, *, deadline_s=DEADLINE_S):
    meshes = [Mesh.create(size, host="127.0.0.1", reached_at="127.0.0.1")]
    meshes += [Mesh.join(meshes[0].address, rank) for rank in range(1, size)]
    groups = [SocketGroup(mesh, deadline_s=deadline_s) for mesh in meshes]
    values(on_all(groups, lambda group: group.wait_for_all(timeout_s=DEADLINE_S)))
    return groups


def torch_groups(size, *, deadline_s=DEADLINE_S):
    controls = shared_memory_groups(size, deadline_s=deadline_s)
    options = {"device": torch.device("cpu"), "host": "127.0.0.1", "deadline_s": deadline_s}
    groups = [TorchGroup(control, **options) for control in controls]
    values(on_all(groups, lambda group: group.wait_for_all(timeout_s=DEADLINE_S)))
    return groups


BACKENDS = {
    "local": lambda size, deadline_s: local_groups(size, deadline_s=deadline_s),
    "shared_memory": lambda size, deadline_s: shared_memory_groups(size, deadline_s=deadline_s),
    "sockets": lambda size, deadline_s: socket_groups(size, deadline_s=deadline_s),
    "torch": lambda size, deadline_s: torch_groups(size, deadline_s=deadline_s),
    # Many steps for few bytes.
    "small_chunks": lambda size, deadline_s: shared_memory_groups(
        size, deadline_s=deadline_s, chunk_bytes=192, ring_bytes=128
    ),
}


@contextmanager
def ranks(backend: str, size: int, deadline_s: float = DEADLINE_S):
    groups = BACKENDS[backend](size, deadline_s)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_all(groups, call: Callable[[Any], Any]) -> list[Any]:
    """What call(group) returns, or the exception that it raises, on every rank at once."""
    results: list[Any] = [None] * len(groups)

    def run(rank):
        try:
            results[rank] = call(groups[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def values(results):
    """The results of a call that no rank failed."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
