"""A worker of the fleet that runs every step with the production `WorkerCore`: the macro model's yardstick.

The costs of a step are the macro worker's; so are links and hops. Tokens are made from the trace's block
hashes, and the hashes that the production code makes of them are turned back in what the router hears.
"""

from collections import deque
from typing import cast

import msgspec

from baton.core.costs import prompt_pairs
from baton.core.hashing import block_hashes
from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.messages import BlockEvents, RouterMessage, StartSequence, WorkerHello
from baton.core.steps import NOTHING_SAMPLED, ItemResult, StepPlan, StepResult
from kv_transfer.read import BlockRead, ReadDone
from simulator.clock import VirtualClock
from simulator.fleet.interface import FleetServices, WorkerUsage
from simulator.fleet.links import KVFlow, NetworkPort
from simulator.fleet.spec import FleetWorkerSpec
from worker.core import WorkerCore
from worker.events import (
    FromOwner,
    FromReader,
    FromRouter,
    RouterJoined,
    RunStep,
    StepDone,
    ToOwner,
    ToReader,
    ToRouter,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)

ROUTER = RouterId("router")
SAMPLED = ItemResult((0,))


class FullWorker:
    """A `FleetWorker` around the production core."""

    def __init__(
        self,
        worker_id: WorkerId,
        spec: FleetWorkerSpec,
        clock: VirtualClock,
        fleet: FleetServices,
        *,
        hop_s: float,
    ) -> None:
        self.worker_id, self.spec = worker_id, spec
        self._clock, self._fleet, self._hop_s = clock, fleet, hop_s
        self.sender, self.receiver = NetworkPort(spec.send_bytes_s), NetworkPort(spec.receive_bytes_s)
        self._block_bytes = int(spec.kv_token_bytes * spec.block_tokens)
        self.core = WorkerCore(
            worker_id=worker_id,
            role=spec.role,
            model="simulated",
            fingerprint="simulated",
            block_tokens=spec.block_tokens,
            block_bytes=self._block_bytes,
            block_count=spec.block_count,
            max_model_tokens=spec.max_model_tokens,
            engine=spec.engine,
            transfer=spec.transfer,
            router_grace_s=1.0,
            heartbeat_s=0.25,
            generations=[0] * spec.block_count,
            now_s=0.0,
        )
        self._free_s = self._busy_s = 0.0
        self._steps: deque[tuple[StepPlan, float]] = deque()
        self._trace_hash: dict[BlockHash, BlockHash] = {}
        self._armed_s: float | None = None
        self._version = 0

    def hello(self) -> WorkerHello:
        spec = self.spec
        return WorkerHello(
            worker_id=self.worker_id,
            role=spec.role,
            fingerprint="simulated",
            model="simulated",
            block_tokens=spec.block_tokens,
            block_count=spec.block_count,
            max_model_tokens=spec.max_model_tokens,
            costs=spec.costs,
            block_bytes=self._block_bytes,
            step_tokens_max=spec.engine.step_tokens_max,
            batch_sequences_max=spec.engine.batch_sequences_max,
        )

    def begin(self, heartbeat_s: float, *, phase_s: float) -> None:
        self._clock.after(0.0, self._feed, RouterJoined(ROUTER))

    def usage(self) -> WorkerUsage:
        return WorkerUsage(self._busy_s, 0, 0, self.core.status().held_blocks)

    def on_message(self, message: RouterMessage) -> None:
        if isinstance(message, StartSequence):
            message = msgspec.structs.replace(message, tokens=self._tokens_of(message))
        self._feed(FromRouter(ROUTER, message))

    def _tokens_of(self, start: StartSequence) -> tuple[int, ...]:
        size = self.spec.block_tokens
        named = self._fleet.hashes_of(start.seq_id)
        tokens: list[int] = []
        for name in named:
            first = int.from_bytes(name[:7], "big") % (1 << 31)
            tokens += [(first * 31 + i) % (1 << 31) for i in range(size)]
        tail = abs(hash(start.seq_id)) % (1 << 30)
        tokens += [(tail + i) % (1 << 31) for i in range(len(start.tokens) - len(tokens))]
        made = block_hashes(start.cache_root, tokens, size)
        self._trace_hash.update(zip(made, named, strict=False))
        return tuple(tokens)

    def _feed(self, event: WorkerEvent) -> None:
        for action in self.core.handle(event, now_s=self._clock.now_s):
            self._perform(action)
        due_s = self.core.next_tick_s
        if due_s is not None and (self._armed_s is None or due_s < self._armed_s):
            self._armed_s = due_s
            self._version += 1
            self._clock.at(due_s + 1e-6, self._tick, self._version)

    def _tick(self, version: int) -> None:
        if version == self._version:
            self._armed_s = None
            self._feed(WorkerTick())

    def _perform(self, action: WorkerAction) -> None:
        match action:
            case ToRouter(_, WorkerHello()):
                pass
            case ToRouter(_, message):
                if isinstance(message, BlockEvents):
                    message = msgspec.structs.replace(
                        message, stored=self._named(message.stored), removed=self._named(message.removed)
                    )
                self._fleet.send_to_router(self, message)
            case ToReader(reader, message):
                peer = cast("FullWorker", self._fleet.worker(reader))
                self._clock.after(self._hop_s, peer._feed, FromOwner(self.worker_id, message))
            case ToOwner(source, message):
                peer = cast("FullWorker", self._fleet.worker(source.worker_id))
                self._clock.after(self._hop_s, peer._feed, FromReader(self.worker_id, message))
            case BlockRead():
                self._read(action)
            case RunStep(plan):
                self._run(plan)
            case _:
                raise AssertionError(f"without a store: {action}")

    def _named(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        return tuple(self._trace_hash[h] for h in hashes if h in self._trace_hash)

    def _read(self, read: BlockRead) -> None:
        source = cast("FullWorker", self._fleet.worker(read.owner))
        done = ReadDone(read.read_id, "", is_settled=True, is_stale=False)
        flow = KVFlow(self._clock, source.sender, self.receiver, lambda: self._feed(done))
        flow.offer(len(read.local_blocks) * self._block_bytes, is_last=True)

    def _run(self, plan: StepPlan) -> None:
        prompt_tokens = decodes = context = pairs = 0
        for item in plan.items:
            count = len(item.tokens)
            if count == 1:
                decodes += 1
                context += item.first_position
            else:
                prompt_tokens += count
                pairs += prompt_pairs(item.first_position, item.first_position + count)
        elapsed_s = self.spec.costs.step_s(
            prompt_tokens=prompt_tokens, decodes=decodes, context_tokens=context, pairs=pairs
        )
        self._busy_s += elapsed_s
        self._free_s = max(self._free_s, self._clock.now_s) + elapsed_s
        self._steps.append((plan, elapsed_s))
        self._clock.at(self._free_s, self._end_step)

    def _end_step(self) -> None:
        plan, elapsed_s = self._steps.popleft()
        results = tuple(NOTHING_SAMPLED if item.sample_index is None else SAMPLED for item in plan.items)
        self._feed(StepDone(StepResult(plan.step_number, results, elapsed_s)))
