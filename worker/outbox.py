"""What leaves the core: actions in order, and one message per step and kind to each router."""

from collections.abc import Iterable, Iterator

from baton.core.ids import RouterId
from baton.core.messages import (
    BlockEvents,
    LoadReport,
    SequenceOutput,
    StepOutput,
    WorkerHello,
    WorkerMessage,
)
from engine.scheduling.prefix_cache import PrefixCache
from worker.events import ToRouter, WorkerAction

MESSAGE_BLOCKS_MAX = 2048
"""Blocks of a snapshot that go into one message. The rest follows as blocks that were stored since: a router
takes a message in one go, and should not be held up for longer."""


class Outbox:
    """Routers with a session, and the actions of the event that is being handled.

    Block events are numbered per session from its snapshot on. Changes are collected once and sent to every
    session before a snapshot is taken. A change that came and went across a snapshot would otherwise be lost
    on the router that got it.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._next_number: dict[RouterId, int] = {}
        self._actions: list[WorkerAction] = []
        self._outputs: dict[RouterId, list[SequenceOutput]] = {}

    @property
    def router_count(self) -> int:
        return len(self._next_number)

    def has(self, router_id: RouterId) -> bool:
        return router_id in self._next_number

    def join(self, router_id: RouterId, hello: WorkerHello, report: LoadReport) -> None:
        self.flush_blocks()
        self._next_number[router_id] = 0
        self._actions.append(ToRouter(router_id, hello))
        self.send_snapshot(router_id)
        self._actions.append(ToRouter(router_id, report))

    def leave(self, router_id: RouterId) -> None:
        self._next_number.pop(router_id, None)
        self._outputs.pop(router_id, None)

    def add(self, action: WorkerAction) -> None:
        self._actions.append(action)

    def extend(self, actions: Iterable[WorkerAction]) -> None:
        self._actions += actions

    def tell(self, router_id: RouterId, message: WorkerMessage) -> None:
        if router_id in self._next_number:
            self._actions.append(ToRouter(router_id, message))

    def tell_all(self, message: WorkerMessage) -> None:
        self._actions += [ToRouter(router_id, message) for router_id in self._next_number]

    def add_output(self, router_id: RouterId, output: SequenceOutput) -> None:
        """Add an output to the one StepOutput in which all outputs of this event go out."""
        if router_id in self._next_number:
            self._outputs.setdefault(router_id, []).append(output)

    def flush_outputs(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for router_id, items in outputs.items():
            self._actions.append(ToRouter(router_id, StepOutput(tuple(items))))

    def flush_blocks(self) -> None:
        changes = self._cache.collect_changes()
        if changes is None:
            return
        for router_id in self._next_number:
            number = self._take_number(router_id)
            events = BlockEvents(number, stored=changes.stored, removed=changes.removed)
            self._actions.append(ToRouter(router_id, events))

    def send_snapshot(self, router_id: RouterId) -> None:
        self.flush_blocks()
        blocks = self._cache.snapshot()
        for start in range(0, max(1, len(blocks)), MESSAGE_BLOCKS_MAX):
            some = blocks[start : start + MESSAGE_BLOCKS_MAX]
            events = BlockEvents(self._take_number(router_id), stored=some, is_snapshot=start == 0)
            self._actions.append(ToRouter(router_id, events))

    def collect(self) -> list[WorkerAction]:
        assert not self._outputs, "outputs left behind"
        actions, self._actions = self._actions, []
        return actions

    def routers(self) -> Iterator[RouterId]:
        return iter(self._next_number)

    def _take_number(self, router_id: RouterId) -> int:
        number = self._next_number[router_id]
        self._next_number[router_id] = number + 1
        return number
