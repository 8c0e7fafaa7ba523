"""Decisions of the worker and of its scheduler, broken on purpose."""

from collections.abc import Sequence as Ordered

from baton.core.ids import BlockId, SeqKey
from baton.core.messages import CancelSequence, Phase, Task
from baton.core.steps import ItemResult, StepItem
from decode_worker.read_queue import ReadQueue
from decode_worker.receiver import KVReceiver
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.items import Work
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.tables import Tables
from tests.simulator.mutant import Mutant, Patch
from worker import core as worker_core
from worker.core import WorkerCore
from worker.core_attempts import Attempt, Attempts
from worker.core_offers import Offers
from worker.core_progress import Phases
from worker.events import WorkerAction


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


def _reused_block_stays_indexed(patch: Patch) -> None:
    """The prefix cache finds blocks that hold something else by now."""
    patch.setattr(PrefixCache, "_forget", lambda self, block: None)


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


def _no_deadline(patch: Patch) -> None:
    """A worker computes what nobody can use any more, because its time is up."""
    overdue = Attempts.overdue

    def nobody(self: Attempts, now_s: float) -> list[Attempt]:
        overdue(self, now_s)
        return []

    patch.setattr(Attempts, "overdue", nobody)


def _unbounded_queue(patch: Patch) -> None:
    """Any number of sequences may wait for a seat."""
    refusal_of = worker_core.refusal_of
    patch.setattr(
        worker_core,
        "refusal_of",
        lambda start, **more: refusal_of(start, **{**more, "waiting_max": 1 << 30}),
    )


def _unbounded_wait_for_blocks(patch: Patch) -> None:
    """Any number of decode phases may wait for blocks."""
    start = KVReceiver.start

    def always(self: KVReceiver, *args: object, **more: object) -> list[object]:
        self._waiting_max = 1 << 30
        return start(self, *args, **more)

    patch.setattr(KVReceiver, "start", always)


def _the_other_phase_runs_on(patch: Patch) -> None:
    """The prefill of an attempt that its router gave up is computed to its end."""
    on_router = WorkerCore._on_router

    def deaf(self: WorkerCore, router_id: object, message: object, now_s: float) -> None:
        if isinstance(message, CancelSequence):
            attempt = self._attempts.get(SeqKey(message.seq_id, message.epoch))
            if attempt is not None and attempt.start.phase is Phase.PREFILL:
                return
        on_router(self, router_id, message, now_s)

    patch.setattr(WorkerCore, "_on_router", deaf)


def _offers_outlive_their_session(patch: Patch) -> None:
    """What was offered to a store that is gone is remembered for ever."""

    def lost(self: Offers) -> None:
        self._is_joined = False
        self._queue.clear()

    patch.setattr(Offers, "lost", lost)


def _reads_are_not_forgotten(patch: Patch) -> None:
    """Blocks that were granted to a phase that ended are read all the same."""
    patch.setattr(ReadQueue, "forget", lambda self, session: None)


MUTANTS = (
    Mutant("no deadline at the worker", _no_deadline, {6}),
    Mutant("the worker's queue has no bound", _unbounded_queue, {6}),
    Mutant("the worker's wait for blocks has no bound", _unbounded_wait_for_blocks, {6}),
    Mutant("the other phase runs on", _the_other_phase_runs_on, {6}),
    Mutant("offers outlive their session", _offers_outlive_their_session, {3}),
    Mutant("reads of ended phases go on", _reads_are_not_forgotten, {0, 3, 4, 5}),
    Mutant("a generation does not rise", _generation_does_not_rise, {2, 4, 7}),
    Mutant("double free", _double_free, {0, 2, 3, 5, 7}),
    Mutant("dropped blocks leak", _dropped_blocks_leak, {3}),
    Mutant("freed during a step", _freed_during_a_step, {2, 3, 5, 7}),
    Mutant("committed before computed", _committed_before_computed, {2, 3, 7}),
    Mutant("freed after the first of two steps", _freed_after_the_first_step, {2, 3, 5, 7}),
    Mutant("committed with a rejected draft token", _committed_with_a_rejected_draft, {0, 2, 3, 6, 7}),
    Mutant("history forgotten after preemption", _history_forgotten_after_preemption, {2}),
    Mutant("a late token is emitted", _late_token_is_emitted, {0, 1, 2, 6}),
    Mutant("swapped to the wrong slot", _swapped_to_the_wrong_slot, {2, 7}),
    Mutant("a tail is not copied", _tail_is_shared, {2, 7}),
    Mutant("the oldest never has its turn", _oldest_never_has_its_turn, {6}),
    Mutant("planned ahead without end", _pending_token_of_a_skipped_step, {0, 2, 3, 6}),
    Mutant("a reused block stays indexed", _reused_block_stays_indexed, {0, 2, 3, 7}),
    Mutant("the worker forgets epochs", _worker_forgets_epochs, {0, 1, 2, 3, 6}),
    Mutant("a lost router is not noticed", _lost_router_is_not_noticed, {6}),
    Mutant("cancel is ignored", _cancel_is_ignored, {6}),
    Mutant("a step's result is lost", _step_result_is_lost, {2, 6}),
)
