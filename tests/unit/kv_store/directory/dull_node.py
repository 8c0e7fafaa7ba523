"""A store node that has blocks and a registration, and nothing else."""

import asyncio
from contextlib import asynccontextmanager

from baton.core.store import NodeRef, StoreChanges, StoreMember, Tier
from kv_store.directory.registration import StoreRegistration
from kv_store.node.events import DirectoryForgot

LEASE_S = 0.03
PART = 3


def h(number):
    return number.to_bytes(16, "big")


def member(name):
    return StoreMember(NodeRef(name, name))


class Node:
    """As much of a core as the registration sees: blocks, and snapshots in parts."""

    def __init__(self, directory, **settings):
        self.blocks, self.number, self.events = {}, 0, []
        self.tasks = set()
        self.registration = StoreRegistration(
            directory,
            member=lambda: member("a"),
            post=self.post,
            spawn=lambda coroutine: self.tasks.add(asyncio.create_task(coroutine)),
            **{"lease_s": LEASE_S, "publish_every_s": 0.0, **settings},
        )

    def post(self, event):
        self.events.append(event)
        if event == DirectoryForgot():
            held = list(self.blocks.items())
            parts = [held[i : i + PART] for i in range(0, max(1, len(held)), PART)]
            for i, part in enumerate(parts):
                ends = {"is_first": i == 0, "is_last": i == len(parts) - 1}
                self.tell(stored=tuple(part), is_snapshot=True, **ends)

    def tell(self, **fields):
        self.number += 1
        self.registration.publish(StoreChanges("a", self.number, **fields))

    def store(self, *numbers):
        new = {h(number): Tier.HOST for number in numbers}
        self.blocks.update(new)
        self.tell(stored=tuple(new.items()))

    def remove(self, number):
        del self.blocks[h(number)]
        self.tell(removed=(h(number),))

    def forgot_count(self):
        return self.events.count(DirectoryForgot())


@asynccontextmanager
async def running(directory, **settings):
    node = Node(directory, **settings)
    task = asyncio.create_task(node.registration.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, *node.tasks, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - of the state of several parties
            await asyncio.sleep(0)
