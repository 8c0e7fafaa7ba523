"""Independent checks of what must always hold. Each names its number in docs/invariants.md.

The checks look from outside: at what clients received, at what lies in the blocks, at what went over the
wire. They ask the decision objects for nothing but their own accounts.
"""

from collections.abc import Callable, Sequence

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import (
    KVGrant,
    KVReleased,
    OwnerMessage,
    ReaderMessage,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerMessage,
)
from baton.core.steps import StepItem, StepPlan
from kv_transfer.read import BlockRead
from router.decisions.events import (
    ClientGone,
    Deliver,
    Failed,
    FailureKind,
    Finished,
    Note,
    RouterAction,
    RouterEvent,
    Submit,
    ToWorker,
)
from router.http.streaming import DEADLINE_GRACE_S
from simulator.faults.answer_checks import AnswerChecks
from simulator.faults.at_rest import Limits, held_at_rest
from simulator.faults.client import Ending, SimClient
from simulator.faults.model import Model
from simulator.faults.observed_processes import ObservedRouter, ObservedStoreNode, ObservedWorker
from simulator.faults.owner_checks import OwnerChecks
from simulator.faults.quota_checks import QuotaChecks
from simulator.faults.router_checks import RouterChecks
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario
from simulator.faults.sequence_checks import SequenceChecks
from simulator.faults.starvation import StarvationChecker
from simulator.faults.worker_checks import WorkerChecks
from worker.events import CopyFromStore, CopyToStore

DEADLINE_SLACK_S = 0.5
"""Longest time after a deadline until its client has an answer."""
CLOCK_SLACK = 1.02
"""Factor by which a router's clock may be fast or slow."""
COMES_BACK_WITHIN_S = 3.0
"""Time after the last arrival within which clients come back."""
PROMISED = (FailureKind.UNMET.value, FailureKind.QUEUE_FULL.value, FailureKind.NO_CAPACITY.value)
"""Failures after which a router keeps a place for the client until it comes back."""
AUDIT_EVERY = 8
"""Events of one worker between two audits of its accounts."""


class Checkers:
    __slots__ = (
        "_answers",
        "_audits",
        "_contents",
        "_ended_outputs",
        "_granted",
        "_lease_ends",
        "_leases",
        "_progress",
        "_routers",
        "_scenario",
        "_starvation",
        "clients",
        "comes_back",
        "is_without_faults",
        "owners",
        "quotas",
        "run",
        "sequences",
        "workers",
    )

    def __init__(self, run: RunContext, clients: list[SimClient], scenario: Scenario, model: Model) -> None:
        self.run, self._scenario = run, scenario
        self.clients: dict[str, SimClient] = {client.request_id: client for client in clients}
        self.sequences = SequenceChecks(run, self.clients, scenario, model)
        self.workers = WorkerChecks(run, scenario)
        self.owners = OwnerChecks(run, lease_s=scenario.transfer.lease_s)
        self.quotas = QuotaChecks(run, scenario)
        self._answers = AnswerChecks(run, scenario)
        self.comes_back: Callable[[SimClient], None] = lambda client: None
        """Schedules a client that comes again; set by the run."""
        self.is_without_faults = not scenario.faults
        """The run has no faults, so nothing may fail for want of a worker."""
        self._audits: dict[str, int] = {}
        self._granted: dict[tuple[WorkerId, WorkerId, int, int], set[tuple[WorkerId, str, int]]] = {}
        """Attempts under which a (KV owner, reader, block, generation) was granted."""
        self._lease_ends: dict[tuple[WorkerId, str, int], float] = {}
        self._leases: dict[tuple[WorkerId, str, int], float] = {}
        self._contents: dict[tuple[WorkerId, int], tuple[str, int]] = {}
        """The sequence that began to fill a block, and the block's generation then."""
        self._progress: dict[tuple[WorkerId, str, int], int] = {}
        self._starvation: dict[WorkerId, StarvationChecker] = {}
        self._routers: dict[str, RouterChecks] = {}
        self._ended_outputs: set[tuple[WorkerId, str, int]] = set()

    # --- what clients see ---------------------------------------------------------------------------

    def left(self, client: SimClient) -> None:
        """Take note of a client that hangs up."""
        self.ended(client, Ending.GONE)

    def ended(self, client: SimClient, ending: Ending) -> None:
        """Check invariant 1: a request ends once."""
        if client.ending is not None:
            raise Violation(1, f"{ending} after {client.ending}", seq_id=client.name)
        client.ending, client.ended_s = ending, self.run.clock.now_s
        self.run.counts[f"ended: {ending}"] += 1
        if ending is Ending.BROKEN:
            self.sequences.router_died(client)

    def answered(self, router: ObservedRouter, client: SimClient) -> None:
        """Check the answer of a request that its router is done with."""
        ending = self._answers.judge(client)
        if client.ending is None:
            self.ended(client, ending)
        checks = self._of(router.name)
        checks.answered(client)
        exchange = client.exchange
        assert exchange is not None
        if ending is Ending.FAILED and (after := exchange.headers.get("retry-after")) is not None:
            checks.refused_count += 1
            self._may_come_back(router, client, int(after), checks.refused_count)

    def before_router_event(self, router: ObservedRouter, event: RouterEvent) -> None:
        match event:
            case Submit():
                sequence = self.sequences.submitted(event)
                self.quotas.submitted(sequence.client)
                self._of(router.name).submitted(sequence)
            case ClientGone(seq_id):
                self.workers.ended(seq_id)
                if self.sequences.cancelled(seq_id):
                    self._of(router.name).failures.finished()
            case _:
                self._of(router.name).observe(event)

    def after_router_event(
        self, router: ObservedRouter, event: RouterEvent, actions: Sequence[RouterAction]
    ) -> None:
        checks = self._of(router.name)
        for action in actions:
            match action:
                case Deliver():
                    self.sequences.delivered(action)
                case Finished():
                    self.sequences.finished(action)
                    self.workers.ended(action.seq_id)
                    checks.failures.finished()
                case Failed():
                    self._failed(action)
                    self.workers.ended(action.seq_id)
                    checks.failed(action, self.sequences.by_id[action.seq_id])
                case Note():
                    sequence = self.sequences.noted(action)
                    checks.noted(router, action, sequence)
                    if action.what == "retried" and self.is_without_faults:
                        raise Violation(
                            6, f"no fault in this run, but retried: {action.reason}", seq_id=action.seq_id
                        )
                case ToWorker(_, StartSequence() as start):
                    self.sequences.started(start)
                case ToWorker():
                    pass
        checks.after_event(router)
        count = self._audits.get(router.name, 0) + 1
        self._audits[router.name] = count
        if count % AUDIT_EVERY == 0:
            self.audit_router(router)

    def _failed(self, action: Failed) -> None:
        self.sequences.failed(action)
        client = self.sequences.by_id[action.seq_id].client
        excused = {
            FailureKind.TOO_LONG,
            FailureKind.QUEUE_FULL,
            FailureKind.NO_CAPACITY,
            FailureKind.UNMET,
        }
        if self.is_without_faults and not client.is_hasty and action.kind not in excused:
            raise Violation(
                6, f"no fault in this run, but {action.kind}: {action.message}", seq_id=action.seq_id
            )

    def router_rested(self, router: ObservedRouter) -> None:
        """Look at a router whose loop has nothing to do now."""
        self._of(router.name).rested(router)

    def router_died(self, router: ObservedRouter) -> None:
        self._routers.pop(router.name, None)

    def arrived(self, router: ObservedRouter, client: SimClient) -> None:
        """Watch the deadline of a request that a router begins to handle."""
        config = self._scenario.router
        limit_s = self._scenario.hasty_s if client.is_hasty else config.request_timeout_s
        # The place of the budgets is asked first, whatever the deadline.
        slack_s = DEADLINE_SLACK_S + self._scenario.store.directory_timeout_s
        slack_s += DEADLINE_GRACE_S if client.is_slow else 0.0
        due_s = self.run.clock.now_s + limit_s * CLOCK_SLACK + slack_s
        self.run.clock.at(due_s, self._is_answered, router, client)

    def _is_answered(self, router: ObservedRouter, client: SimClient) -> None:
        """Check invariant 6: nobody waits for longer than its deadline."""
        now_s = self.run.clock.now_s
        if client.ending is not None or not router.is_alive:
            return
        if router.is_frozen or now_s < router.thawed_s + DEADLINE_SLACK_S:
            self.run.clock.after(DEADLINE_SLACK_S, self._is_answered, router, client)
            return
        seq_id = client.sequences[-1].seq_id if client.sequences else ""
        raise Violation(6, f"{client.name} waits at {router.name} after its deadline", seq_id=seq_id)

    def _may_come_back(
        self, router: ObservedRouter, client: SimClient, after_s: int, refused_count: int
    ) -> None:
        """Let a client that was refused come again at the time that it was told."""
        back_s = self.run.clock.now_s + after_s + 0.1
        if not client.comes_back or back_s > self._scenario.arrivals_s + COMES_BACK_WITHIN_S:
            return
        again = client.again(f"{client.name}.again")
        config = self._scenario.router
        bounds = [one.queue_max for one in self._scenario.slo.classes.values() if one.queue_max]
        places = min([config.queue_requests_max, *filter(None, (config.queue_tenant_max,)), *bounds])
        is_promised = any(s.failure.startswith(PROMISED) for s in client.sequences)
        if is_promised and refused_count <= max(1, places // 4):
            again.promised_by = router.name
        again.arrives_s = back_s
        self.run.counts["clients that came back"] += 1
        self.run.counts["clients that came back to a promise"] += bool(again.promised_by)
        self.clients[again.request_id] = again
        self.comes_back(again)

    def _of(self, router: str) -> RouterChecks:
        if router not in self._routers:
            self._routers[router] = RouterChecks(self.run, self._scenario, router)
        return self._routers[router]

    def audit_router(self, router: ObservedRouter) -> None:
        try:
            router.core.check()
        except AssertionError as error:
            raise Violation(8, f"{router.name}'s accounts: {error}") from error

    # --- what workers do ----------------------------------------------------------------------------

    def after_worker_event(self, worker: ObservedWorker) -> None:
        """Check invariant 3 every few events: free + held = all."""
        count = self._audits.get(worker.worker_id, 0) + 1
        self._audits[worker.worker_id] = count
        if count % AUDIT_EVERY == 0:
            self.audit(worker)

    def audit(self, worker: ObservedWorker) -> None:
        try:
            worker.core.check()
        except AssertionError as error:
            raise Violation(3, f"{worker.name}'s accounts: {error}") from error

    def observe_worker_message(self, worker: ObservedWorker, message: WorkerMessage) -> None:
        counts = self.run.counts
        self.workers.said(worker, message)
        match message:
            case SequenceJoined():
                counts["decode phases joined"] += 1
                counts["bytes handed over"] += message.transferred_bytes
            case SequenceRefused():
                counts[f"refused: {message.reason}"] += 1
            case SequenceFailed():
                counts[f"attempt failed: {message.reason}"] += 1
            case StepOutput(outputs):
                for output in outputs:
                    self._is_not_late(worker, output)
                return
            case _:
                return
        self.run.note(worker.name, message)

    def _is_not_late(self, worker: ObservedWorker, output: SequenceOutput) -> None:
        """Check invariant 1: what a step planned ahead computes of an ended sequence is never heard."""
        key = (worker.worker_id, output.seq_id, output.epoch)
        if key in self._ended_outputs:
            raise Violation(1, f"{worker.name} says {output} after the end", seq_id=output.seq_id)
        if output.finish is not None:
            self._ended_outputs.add(key)

    def observe_owner_message(self, worker: ObservedWorker, reader: WorkerId, message: OwnerMessage) -> None:
        """Remember until when what is held, and count leases that nobody releases or renews."""
        self.owners.said(worker, reader, message)
        if not isinstance(message, KVGrant):
            self.run.counts["KV requests refused by the owner"] += 1
            return
        if message.source_blocks:
            self.run.counts["grants of blocks"] += 1
        key = (worker.worker_id, message.seq_id, message.epoch)
        ends_s = self.run.clock.now_s + message.lease_s
        self._leases[key] = self._lease_ends[key] = ends_s
        for block, generation in zip(message.source_blocks, message.generations, strict=True):
            self._granted.setdefault((worker.worker_id, reader, block, generation), set()).add(key)
        self.run.clock.after(message.lease_s + 0.001, lambda: self._lease_over(worker, key, ends_s))

    def read_starts(self, worker: ObservedWorker, read: BlockRead) -> None:
        """Check invariant 5 at the reader: the time that a read is given lies within the owner's lease."""
        if self.run.clock.now_s < worker.clock_trusted_from_s:
            return
        until_s = self.run.clock.now_s + read.timeout_s
        for block, generation in zip(read.source_blocks, read.generations, strict=True):
            keys = self._granted.get((read.owner, worker.worker_id, block, generation))
            if keys is None:
                raise Violation(4, f"{worker.name} reads block {block} of {read.owner}, never granted to it")
            ends_s = max(self._lease_ends[key] for key in keys)
            if until_s > ends_s:
                raise Violation(
                    5,
                    f"{worker.name} gives read {read.read_id} time until {until_s:.3f} s, and the lease of "
                    f"block {block} of {read.owner} ends at {ends_s:.3f} s",
                    seq_id=min(keys)[1],
                )

    def observe_reader_message(
        self, worker: ObservedWorker, reader: WorkerId, message: ReaderMessage
    ) -> None:
        self.owners.heard(worker, reader, message)
        if isinstance(message, KVReleased):
            self._leases.pop((worker.worker_id, message.seq_id, message.epoch), None)
            self.run.counts["leases released" if message.taken else "leases given back unread"] += 1

    def _lease_over(self, worker: ObservedWorker, key: tuple[WorkerId, str, int], ends_s: float) -> None:
        if self._leases.get(key) == ends_s:
            del self._leases[key]
            if worker.is_alive:
                self.run.counts["leases expired"] += 1

    def copy_starts(self, worker: ObservedWorker, copy: CopyToStore | CopyFromStore) -> None:
        """Check invariant 3: whatever is copied is held meanwhile."""
        if not copy.blocks or len(copy.blocks) != len(copy.slots) or len(set(copy.slots)) != len(copy.slots):
            raise Violation(0, f"{worker.name}: malformed {copy}")

    def observe_start(self, worker: ObservedWorker, router_id: RouterId, start: StartSequence) -> None:
        self.workers.started(worker, router_id, start)
        self._starvation.setdefault(worker.worker_id, StarvationChecker()).observe_start(worker, start)

    def step_planned(self, worker: ObservedWorker, plan: StepPlan) -> None:
        if not plan.items:
            raise Violation(0, f"{worker.name}: an empty step")
        self._count_features(worker, plan)
        self.workers.planned(worker, plan)
        self._starvation.setdefault(worker.worker_id, StarvationChecker()).observe_plan(worker, plan)
        for item in plan.items:
            self._is_new_content(worker, item)
            key = (worker.worker_id, item.key.seq_id, item.key.epoch)
            # Coverage: an item that starts before what was computed has been preempted meanwhile.
            if item.first_position < self._progress.get(key, 0):
                self.run.counts["preemptions"] += 1
            self._progress[key] = item.first_position + len(item.tokens)

    def _count_features(self, worker: ObservedWorker, plan: StepPlan) -> None:
        """Count which features a step used, for coverage."""
        counts = self.run.counts
        counts["steps"] += 1
        counts["steps planned ahead"] += worker.is_computing
        counts["tails copied"] += len(plan.copies)
        counts["blocks swapped out"] += len(plan.swap_out)
        counts["blocks swapped in"] += len(plan.swap_in)
        for item in plan.items:
            counts["draft tokens"] += item.draft_count
            counts["histories given"] += item.history is not None
            counts["embeddings"] += item.wants_embedding

    def _is_new_content(self, worker: ObservedWorker, item: StepItem) -> None:
        """Check invariant 4: the generation of a block rises before somebody else's content is written."""
        tokens = self._scenario.block_tokens
        first = -(-item.first_position // tokens)
        last = (item.first_position + len(item.tokens) - 1) // tokens
        who = str(item.key)
        for block in item.block_ids[first : last + 1]:
            generation = worker.generations[block]
            before = self._contents.get((worker.worker_id, block))
            if before is not None and before[0] != who and before[1] == generation:
                raise Violation(
                    4,
                    f"{worker.name}: block {block} of {before[0]} is filled anew by {who} and its generation "
                    f"is {generation} as before",
                    seq_id=client_of(who),
                )
            self._contents[worker.worker_id, block] = (who, generation)

    def step_used(self, worker: ObservedWorker, plan: StepPlan, generations: list[list[int]]) -> None:
        """Check invariant 3: no block is given out while a step uses it."""
        for item, before in zip(plan.items, generations, strict=True):
            if before != [worker.generations[block] for block in item.block_ids]:
                raise Violation(
                    3,
                    f"{worker.name}: a block of {item.key} was given to somebody else during its step",
                    seq_id=item.key.seq_id,
                )

    # --- at the end ---------------------------------------------------------------------------------

    def all_ended(self) -> bool:
        return all(client.ending is not None for client in self.clients.values())

    def liveness(self, within_s: float) -> None:
        """Check invariant 6: every request has ended."""
        late = [client for client in self.clients.values() if client.ending is None]
        if late:
            raise Violation(
                6,
                f"{len(late)} requests have not ended {within_s:g} s after the faults stopped; the first is "
                f"{late[0].name} of {late[0].router_name}: {[s.state for s in late[0].sequences]}",
                seq_id=late[0].sequences[-1].seq_id if late[0].sequences else "",
            )

    def rest(
        self,
        workers: Sequence[ObservedWorker],
        routers: Sequence[ObservedRouter],
        nodes: Sequence[ObservedStoreNode],
    ) -> None:
        """Check invariants 3 and 8: idle means that nothing is held and every counter is zero."""
        limits = Limits(self._scenario, sequences=self.workers.sequence_count)
        for node in nodes:
            node.audit()
            if not node.core.is_idle:
                raise Violation(3, f"{node.name} still holds something: {node.core.status()}")
            held_at_rest(node.name, node.core, limits)
        for worker in workers:
            self.audit(worker)
            if not worker.core.is_idle:
                raise Violation(3, f"{worker.name} still holds something: {worker.core.status()}")
            worker.ranks.check()
            held_at_rest(worker.name, worker.core, limits)
        for router in routers:
            self.audit_router(router)
            if router.is_alive:
                self._of(router.name).counts.at_rest(router)
            if not router.core.is_idle:
                raise Violation(8, f"{router.name} is not idle: {router.core.status()}")


def client_of(key: str) -> str:
    """Return the sequence id of a printed (sequence, epoch)."""
    return key.split("@", 1)[0]
