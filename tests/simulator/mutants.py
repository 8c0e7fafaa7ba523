"""Production decisions, broken on purpose. Each mutant names the promise that it breaks."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import msgspec
import pytest

from baton.core.ids import BlockHash, BlockId, SeqKey
from baton.core.messages import Role, Task, WorkerHello
from baton.core.steps import ItemResult, StepItem
from decode_worker.receiver import KVReceiver
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.items import Work
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.tables import Tables
from kv_transfer.lease import ReaderLease
from kv_transfer.read import ReadDone
from prefill_worker.handovers import Handovers
from router.decisions import breaker
from router.decisions import core as router_core
from router.decisions.breaker import BreakerState, Circuit
from router.decisions.cluster.snapshot import WorkerFacts
from router.decisions.core import RouterCore
from router.decisions.flow import Flow
from router.decisions.placing import Placing
from router.decisions.retry_budgets import CreditBudget, WindowBudget
from router.decisions.token_order import TokenOrder
from simulator.faults import reads
from tests.simulator import store_mutants as store
from worker import core as worker_core
from worker.core import WorkerCore
from worker.core_attempts import Attempt
from worker.core_progress import Phases
from worker.events import WorkerAction

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    name: str
    apply: Callable[[Patch], None]
    invariants: frozenset[int]
    """Invariants that may be the first to be seen broken."""


def _lease_book_ignores_readers(patch: Patch) -> None:
    """A cancelled hand-over is freed at once, whoever reads it."""

    def close(self: Handovers, key: SeqKey, reason: str, *, now_s: float) -> list[object]:
        handover = self._handovers.get(key)
        if handover is not None:
            self._end(handover, reason, now_s=now_s)
        return []

    patch.setattr(Handovers, "close", close)


def _lease_book_holds_nothing(patch: Patch) -> None:
    """Granted blocks are the sequence's alone: gone when it is."""
    patch.setattr(Handovers, "_hold", lambda self, handover, blocks: None)


def _lease_never_lapses(patch: Patch) -> None:
    """Blocks of a reader that died are held for ever."""
    patch.setattr(
        Handovers, "_lapse", lambda self, handover, *, now_s: setattr(handover.lease, "end_s", now_s + 1)
    )


def _receiver_ignores_lease_end(patch: Patch) -> None:
    """Reads go on after the lease."""
    granted = ReaderLease.granted

    def for_ever(self: ReaderLease, number: int, *, lease_s: float, slack_s: float) -> None:
        granted(self, number, lease_s=lease_s, slack_s=slack_s)
        self.end_s += 1000.0

    patch.setattr(ReaderLease, "granted", for_ever)


def _receiver_counts_lease_from_the_grant(patch: Patch) -> None:
    """The lease starts at the grant: it is longer by a renewal's length and the network's delay."""
    granted = KVReceiver.granted

    def from_now(self: KVReceiver, owner: object, grant: object, *, now_s: float) -> list[object]:
        incoming = self._incoming_from(owner, SeqKey(grant.seq_id, grant.epoch))
        if incoming is not None:
            sent_s = incoming.lease._sent_s
            incoming.lease._sent_s = dict.fromkeys(sent_s, now_s + self._config.lease_slack_s)
        return granted(self, owner, grant, now_s=now_s)

    patch.setattr(KVReceiver, "granted", from_now)


def _receiver_trusts_unsettled_reads(patch: Patch) -> None:
    """Blocks that a lost read may still write into are used again."""
    read_done = KVReceiver.read_done

    def at_once(self: KVReceiver, done: ReadDone, *, now_s: float) -> list[object]:
        return read_done(self, msgspec.structs.replace(done, is_settled=True), now_s=now_s)

    patch.setattr(KVReceiver, "read_done", at_once)


def _generations_not_compared(patch: Patch) -> None:
    """A read is good when its bytes have arrived."""
    patch.setattr(reads, "generations_match", lambda current, action: True)


def _generation_does_not_rise(patch: Patch) -> None:
    """A block given out again looks as it did before."""

    def allocate_one(self: BlockPool) -> BlockId:
        block, _ = (self._blank or self._kept).popitem(last=False)
        if block in self._remembered:
            self._remembered.remove(block)
            if self._forget is not None:
                self._forget(block)
        self._ref_counts[block] = 1
        return block

    patch.setattr(BlockPool, "_allocate_one", allocate_one)


def _double_free(patch: Patch) -> None:
    """A shared block is free as soon as one of its holders is done."""

    def release(self: BlockPool, blocks: Ordered[BlockId]) -> None:
        for block in reversed(blocks):
            if self._ref_counts.pop(block, None) is not None:
                (self._kept if block in self._remembered else self._blank)[block] = None

    patch.setattr(BlockPool, "release", release)


def _dropped_blocks_leak(patch: Patch) -> None:
    """A sequence cancelled during a step never gives its blocks back."""
    release = Tables.release

    def only_living(self: Tables, seq: Sequence) -> None:
        if not seq.is_dropped:
            release(self, seq)

    patch.setattr(Tables, "release", only_living)


def _freed_during_a_step(patch: Patch) -> None:
    """A sequence cancelled during a step gives its blocks back while the step still writes them."""
    remove = Scheduler.remove

    def at_once(self: Scheduler, seq: Sequence) -> None:
        remove(self, seq)
        if seq.is_dropped:
            blocks, seq.block_ids = seq.block_ids, []
            self._pool.release(blocks)

    patch.setattr(Scheduler, "remove", at_once)
    _commits_living_ones_only(patch)


def _freed_after_the_first_step(patch: Patch) -> None:
    """A cancelled sequence with a step planned ahead is released when the first of both steps is done."""
    advance = Scheduler._advance

    def last_one(self: Scheduler, seq: Sequence, *args: object) -> None:
        advance(self, seq, *args)
        if seq.is_dropped and seq.steps_open:
            blocks, seq.block_ids = seq.block_ids, []
            self._pool.release(blocks)

    patch.setattr(Scheduler, "_advance", last_one)
    _commits_living_ones_only(patch)


def _commits_living_ones_only(patch: Patch) -> None:
    computed = Tables.computed
    patch.setattr(Tables, "computed", lambda self, seq: None if seq.is_dropped else computed(self, seq))


def _committed_before_computed(patch: Patch) -> None:
    """Blocks are offered to others when their computation begins."""
    item = Scheduler._item

    def commit_first(self: Scheduler, work: Work) -> object:
        found = item(self, work)
        seq = work.sequence
        full_count = min(seq.planned_count, len(seq.tokens)) // self._block_tokens
        for i, block_hash in enumerate(seq.hashes_of(full_count)[seq.committed_count :], seq.committed_count):
            self._tables._cache.insert(block_hash, seq.block_ids[i])
        seq.committed_count = max(seq.committed_count, full_count)
        return found

    patch.setattr(Scheduler, "_item", commit_first)


def _committed_with_a_rejected_draft(patch: Patch) -> None:
    """Draft tokens count as computed whether or not they were right."""
    advance = Scheduler._advance

    def all_right(self: Scheduler, seq: Sequence, item: StepItem, sampled: ItemResult) -> None:
        advance(self, seq, item, sampled)
        if item.draft_count:
            seq.computed_count += item.draft_count - (len(sampled.tokens) - 1)
            seq.planned_count = seq.computed_count

    patch.setattr(Scheduler, "_advance", all_right)


def _history_forgotten_after_preemption(patch: Patch) -> None:
    """The executor is told that a preempted sequence is over, and not what it was when it is back."""
    preempt = Scheduler._preempt_lowest

    def forgets(self: Scheduler) -> Sequence:
        victim = preempt(self)
        victim.has_history = True
        return victim

    patch.setattr(Scheduler, "_preempt_lowest", forgets)


def _late_token_is_emitted(patch: Patch) -> None:
    """A sequence that ended goes on with the token of the step that was planned ahead."""
    finish = Phases._end

    def later(self: Phases, attempt: Attempt, seq: Sequence) -> None:
        if seq.steps_open and seq.finish is not None and seq.task is Task.GENERATE:
            seq.finish = None
            return
        finish(self, attempt, seq)

    patch.setattr(Phases, "_end", later)


def _swapped_to_the_wrong_slot(patch: Patch) -> None:
    """Slots are free again before their content is back."""
    swap_in = Tables._swap_in

    def at_once(self: Tables, seq: Sequence, cached_count: int) -> int:
        end = swap_in(self, seq, cached_count)
        self.moves.swap_in = [(self.moves.swap_in[0][0], block) for _, block in self.moves.swap_in]
        return end

    patch.setattr(Tables, "_swap_in", at_once)


def _tail_is_shared(patch: Patch) -> None:
    """The copy of a part-filled block is forgotten."""
    take = Tables.take_moves

    def no_copies(self: Tables) -> object:
        moves = take(self)
        moves.copies.clear()
        return moves

    patch.setattr(Tables, "take_moves", no_copies)


def _oldest_never_has_its_turn(patch: Patch) -> None:
    """Short prompts go before long ones for ever."""
    patch.setattr(Scheduler, "_is_oldests_turn", False)


def _pending_token_of_a_skipped_step(patch: Patch) -> None:
    """A step planned ahead names its token, as if the one before had been sampled."""
    patch.setattr(Sequence, "is_runnable", property(lambda self: self.pending_count > 0))


def _cache_ignores_the_salt(patch: Patch) -> None:
    """All tenants share one hash chain."""
    patch.setattr(router_core, "root_hash", lambda fingerprint, salt: BlockHash(bytes(16)))


def _reused_block_stays_indexed(patch: Patch) -> None:
    """The prefix cache finds blocks that hold something else by now."""
    patch.setattr(PrefixCache, "_forget", lambda self, block: None)


def _epoch_does_not_rise(patch: Patch) -> None:
    """A new attempt looks like the old one."""
    requeue = Flow._requeue

    def same_epoch(self: Flow, *args: object, **kwargs: object) -> list[object]:
        actions = requeue(self, *args, **kwargs)
        self.epoch -= 1
        return actions

    patch.setattr(Flow, "_requeue", same_epoch)


def _router_ignores_indices(patch: Patch) -> None:
    """Whatever a worker says is new: stale outputs and the repeated first token go to the client."""

    def accept(self: TokenOrder, output: object) -> object:
        self.generated.extend(output.tokens)
        return output.finish

    patch.setattr(TokenOrder, "accept", accept)


def _worker_forgets_epochs(patch: Patch) -> None:
    """A worker takes a start that it has seen before, or a lower epoch, for a new one."""
    patch.setattr(worker_core.Epochs, "highest", lambda self, seq_id: -1)
    patch.setattr(worker_core.Epochs, "was_started", lambda self, key: False)


def _lost_router_is_not_noticed(patch: Patch) -> None:
    """Sequences of a dead router run on."""
    patch.setattr(WorkerCore, "_cancel_all_of", lambda self, router_id, reason, now_s: None)


def _cancel_is_ignored(patch: Patch) -> None:
    """A client that left is served to the end."""
    patch.setattr(WorkerCore, "_cancel", lambda self, key, reason, now_s: None)


def _lost_worker_is_not_noticed(patch: Patch) -> None:
    """The router waits for a worker that is gone."""
    lose = RouterCore._lose

    def only_new_sessions(self: RouterCore, worker_id: object, reason: str) -> list[object]:
        return lose(self, worker_id, reason) if reason == "a new session began" else []

    patch.setattr(RouterCore, "_lose", only_new_sessions)


def _step_result_is_lost(patch: Patch) -> None:
    """Now and then a step's tokens do not reach the router."""
    handle = WorkerCore.handle

    def forgetful(self: WorkerCore, event: object, *, now_s: float) -> list[WorkerAction]:
        actions = handle(self, event, now_s=now_s)
        outputs = [a for a in actions if type(getattr(a, "message", None)).__name__ == "StepOutput"]
        if outputs and int(now_s * 1e6) % 50 == 0:
            actions.remove(outputs[0])
        return actions

    patch.setattr(WorkerCore, "handle", forgetful)


def _weights_are_not_compared(patch: Patch) -> None:
    """During an upgrade old and new workers are paired."""
    of = WorkerFacts.of

    def all_alike(hello: WorkerHello, role: Role, *, is_draining: bool) -> WorkerFacts:
        return of(hello, role, is_draining=is_draining)._replace(fingerprint="any")

    patch.setattr(WorkerFacts, "of", all_alike)


def _losers_of_hedges_are_heard(patch: Patch) -> None:
    """The slower one of two attempts is not cancelled."""

    def decide(self: RouterCore, winner: Flow) -> list[object]:
        self._hedging.decided(winner.name, winner.submit.seq_id, wasted_tokens=0)
        winner.become_primary()
        return []

    patch.setattr(RouterCore, "_decide", decide)


def _load_of_hedges_is_kept(patch: Patch) -> None:
    """A second attempt that is over counts at its workers for ever."""
    settle = Placing.settle

    def keeps(self: Placing, flow: Flow, *, now_s: float) -> bool:
        return False if "~" in flow.name and flow.is_over else settle(self, flow, now_s=now_s)

    patch.setattr(Placing, "settle", keeps)


def _breakers_never_close(patch: Patch) -> None:
    """A worker that was kept out once stays out."""
    patch.setattr(
        Circuit, "state", lambda self, now_s: BreakerState.OPEN if self.is_open else BreakerState.CLOSED
    )


def _breakers_take_whole_pools(patch: Patch) -> None:
    """All workers of a pool may be kept out."""
    patch.setattr(breaker, "_may_be_out", lambda count, share_max: count)


def _retries_have_no_budget(patch: Patch) -> None:
    patch.setattr(WindowBudget, "take", lambda self, now_s, **_: True)


def _hedges_have_no_budget(patch: Patch) -> None:
    patch.setattr(CreditBudget, "has_credit", True)
    patch.setattr(CreditBudget, "take", lambda self: None)


def _any(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


MUTANTS = (
    Mutant("lease book ignores readers", _lease_book_ignores_readers, _any(0, 3, 5)),
    Mutant("lease book holds nothing", _lease_book_holds_nothing, _any(0, 3, 5)),
    Mutant("lease never lapses", _lease_never_lapses, _any(3, 6)),
    Mutant("receiver ignores the lease's end", _receiver_ignores_lease_end, _any(5)),
    Mutant("receiver counts the lease from the grant", _receiver_counts_lease_from_the_grant, _any(5)),
    Mutant("receiver trusts unsettled reads", _receiver_trusts_unsettled_reads, _any(2, 7)),
    Mutant("generations are not compared", _generations_not_compared, _any(4)),
    Mutant("a generation does not rise", _generation_does_not_rise, _any(2, 4, 7)),
    Mutant("double free", _double_free, _any(0, 2, 3, 5, 7)),
    Mutant("dropped blocks leak", _dropped_blocks_leak, _any(3)),
    Mutant("freed during a step", _freed_during_a_step, _any(2, 3, 5, 7)),
    Mutant("committed before computed", _committed_before_computed, _any(2, 3, 7)),
    Mutant("freed after the first of two steps", _freed_after_the_first_step, _any(2, 3, 5, 7)),
    Mutant("committed with a rejected draft token", _committed_with_a_rejected_draft, _any(0, 2, 3, 6, 7)),
    Mutant("history forgotten after preemption", _history_forgotten_after_preemption, _any(2)),
    Mutant("a late token is emitted", _late_token_is_emitted, _any(0, 1, 2, 6)),
    Mutant("swapped to the wrong slot", _swapped_to_the_wrong_slot, _any(2, 7)),
    Mutant("a tail is not copied", _tail_is_shared, _any(2, 7)),
    Mutant("the oldest never has its turn", _oldest_never_has_its_turn, _any(6)),
    Mutant("planned ahead without end", _pending_token_of_a_skipped_step, _any(0, 2, 3, 6)),
    Mutant("cache ignores the salt", _cache_ignores_the_salt, _any(7)),
    Mutant("a reused block stays indexed", _reused_block_stays_indexed, _any(0, 2, 3, 7)),
    Mutant("the epoch does not rise", _epoch_does_not_rise, _any(6)),
    Mutant("the router ignores indices", _router_ignores_indices, _any(2)),
    Mutant("the worker forgets epochs", _worker_forgets_epochs, _any(0, 1, 2, 3, 6)),
    Mutant("a lost router is not noticed", _lost_router_is_not_noticed, _any(6)),
    Mutant("cancel is ignored", _cancel_is_ignored, _any(6)),
    Mutant("a lost worker is not noticed", _lost_worker_is_not_noticed, _any(0, 6, 8)),
    Mutant("weights are not compared", _weights_are_not_compared, _any(7)),
    Mutant("a step's result is lost", _step_result_is_lost, _any(2, 6)),
    Mutant("the loser of a hedge is heard", _losers_of_hedges_are_heard, _any(0, 1, 2)),
    Mutant("load of a hedge is not taken back", _load_of_hedges_is_kept, _any(0, 8)),
    Mutant("a breaker never closes", _breakers_never_close, _any(11)),
    Mutant("breakers take whole pools", _breakers_take_whole_pools, _any(11)),
    Mutant("retries have no budget", _retries_have_no_budget, _any(12)),
    Mutant("hedges have no budget", _hedges_have_no_budget, _any(12)),
)

STORE_MUTANTS = (
    Mutant("corrupt copies are taken", store.corrupt_copies_are_taken, _any(2, 7)),
    Mutant("corrupt reads are served", store.corrupt_reads_are_served, _any(2, 7)),
    Mutant("loads never end", store.loads_never_end, _any(3)),
    Mutant("unwritten blocks are kept", store.unwritten_blocks_are_kept, _any(2, 7)),
    Mutant("half written blocks are kept", store.half_written_blocks_are_kept, _any(2, 3, 7)),
    Mutant("a lost worker keeps its pins", store.a_lost_worker_keeps_its_pins, _any(0, 3)),
    Mutant("offers are never settled", store.offers_are_never_settled, _any(3)),
)
