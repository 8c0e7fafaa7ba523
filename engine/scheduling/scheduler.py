"""Continuous batching: which tokens of which sequences the next engine step computes.

A sequence is a list of known tokens of which the first `computed_count` are in the KV pool. Every
step moves some sequences forward; when all known tokens are computed the next one is sampled. Prompt
chunks and decodes are therefore the same thing (vLLM v1), and preemption by recompute is setting
`computed_count` back to 0: tokens that were sampled stay known and are never sampled again.

A step may be planned while others run (`scheduling.overlap`): positions count as computed when they are
planned, and a token that is being sampled is named PENDING_TOKEN. Nobody is preempted while a step is under
way.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator

from baton.config import EngineConfig
from baton.core.chunks import PromptRoom
from baton.core.geometry import blocks_for
from baton.core.ids import BlockId, SeqKey
from baton.core.messages import Phase, Task
from baton.core.steps import ItemResult, StepItem, StepPlan, StepResult
from engine.scheduling.block_pool import OutOfBlocks
from engine.scheduling.budget import prompt_room
from engine.scheduling.items import OpenStep, Work, item_of, work_of
from engine.scheduling.order import GENERATED_TOKEN_COST, OLDEST_EVERY, Rank, TurnOrder
from engine.scheduling.overlap import StepOverlap
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.sequence import Progress, Sequence
from engine.scheduling.speculation import Speculator
from engine.scheduling.step_time import StepTimeModel
from engine.scheduling.tables import Tables

WATERMARK_SHARE = 100
"""While others run, 1/100 of the pool stays free at admission, so that they can grow a little before
somebody must be preempted."""
GAIN_SMOOTHING = 0.02
"""Weight of one sequence's newest step in `tokens_per_step`."""


class Scheduler:
    """Sequences wait for a seat (`batch_sequences_max`) and for blocks; `scheduling.order` says whose
    turn it is.

    Admission needs blocks for all that is known of the sequence and the position of its next token,
    so a prompt once begun never waits for blocks; only generation grows, one block at a time. When
    none is free the lowest and youngest sequence that generates here is preempted. PREFILL phases are
    not: they do not grow, and a reader may be reading their blocks.
    """

    def __init__(
        self, cache: PrefixCache, engine: EngineConfig, *, block_tokens: int, block_bytes: int
    ) -> None:
        self._pool = cache.pool
        self._engine = engine
        self._block_tokens = block_tokens
        self._tables = Tables(
            cache, block_tokens=block_tokens, swap_slot_count=engine.swap_bytes // block_bytes
        )
        self._order = TurnOrder()
        self._overlap = StepOverlap(engine)
        self.times = StepTimeModel(chunk_tokens=engine.step_tokens_max, stages=self._overlap.stages)
        self._speculator = Speculator(engine)
        self._waiting: list[Sequence] = []
        self._joined: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._dropped: list[Sequence] = []
        self._steps: deque[OpenStep] = deque()
        self._arrivals = self._admissions = self._prompt_steps = 0
        self._step_number = 0
        self._is_head_blocked = False
        self._now_s = 0.0
        self._preempted: list[Sequence] = []
        self._ended: list[SeqKey] = []
        """Sequences that were computed here and have ended, which the executor does not know yet."""
        self.preemption_count = self.swap_count = 0
        """Preemptions since the start. `swap_count` counts those that kept their KV."""
        self.drafted_count = self.accepted_count = 0
        """Draft tokens verified and accepted since the start."""
        self.tokens_per_step = 1.0
        """Smoothed number of tokens that one step adds to a sequence that decodes."""

    # --- what others may know -------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        return bool(self._steps)

    @property
    def can_plan(self) -> bool:
        return len(self._steps) < self._overlap.steps_max

    @property
    def running_count(self) -> int:
        return len(self._running) + len(self._joined)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._joined or self._running or self._steps)

    @property
    def keep_free(self) -> int:
        """Blocks that must stay free when others reserve: all of them while who is next lacks blocks,
        else it would starve behind smaller arrivals; the watermark while any run."""
        if self._is_head_blocked and self._waiting:
            return self._pool.block_count
        return self._watermark()

    @property
    def waiting_keys(self) -> frozenset[SeqKey]:
        return frozenset(seq.key for seq in self._waiting)

    def waiting_token_count(self) -> int:
        """Tokens accepted whose KV is not computed yet, those being generated left out."""
        waiting = sum(seq.pending_count for seq in self._waiting)
        return waiting + sum(seq.pending_count for seq in self._running if seq.pending_count > 1)

    def decoding(self) -> list[Sequence]:
        """Sequences whose prompt is computed, seated or about to be."""
        return [*self._joined, *(seq for seq in self._running if seq.is_decoding)]

    def sequences(self) -> Iterator[Sequence]:
        """All that hold blocks or wait for them, dropped ones of steps under way included."""
        yield from self._waiting
        yield from self._joined
        yield from self._running
        yield from self._dropped

    def held_blocks(self) -> Iterator[BlockId]:
        """Blocks that the scheduler holds, one entry for each reference."""
        for seq in self.sequences():
            yield from seq.block_ids
        for moves in (*(step.moves for step in self._steps), self._tables.moves):
            yield from moves.references

    def queue_s(self, seq: Sequence) -> float:
        """Predicted seconds for the prompts that came before it."""
        others = (s for s in (*self._running, *self._waiting) if s.order < seq.order and s.pending_count > 1)
        return sum(self.times.work_s(s.planned_count, s.planned_count + s.pending_count) for s in others)

    # --- coming and going -----------------------------------------------------------------------

    def on_commit(self, tell: Callable[[Sequence, int, int], None]) -> None:
        """Call `tell(sequence, first, end)` for blocks that were computed here and became findable."""
        self._tables.on_commit(tell)

    def take_preempted(self) -> list[Sequence]:
        """Sequences that were preempted since the last call. Some may have been admitted again already."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def arrived(self, seq: Sequence) -> bool:
        """Take note that its `incoming` moved. True if more of it counts as computed now."""
        return self._tables.arrived(seq)

    def add(self, seq: Sequence, *, now_s: float) -> None:
        """Add a sequence that holds nothing yet. It waits for a seat and for blocks."""
        assert not seq.block_ids
        self._number(seq, now_s)
        self._waiting.append(seq)

    def join(self, seq: Sequence, *, now_s: float) -> None:
        """Add a sequence of which all but the newest token is computed. Its blocks become the scheduler's."""
        seq.planned_count, seq.generated_here = seq.computed_count, True
        assert seq.pending_count == 1
        assert len(seq.block_ids) * self._block_tokens >= len(seq.tokens)
        self._number(seq, now_s)
        self._joined.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is over. Its blocks are released once no step under way uses them."""
        for queue in (self._waiting, self._joined, self._running):
            if seq in queue:
                queue.remove(seq)
        self._order.shares.leave(seq.fairness_key)
        seq.incoming = None
        if seq.last_step:
            self._ended.append(seq.key)
        if seq.steps_open:
            seq.is_dropped = True
            self._dropped.append(seq)
        else:
            self._tables.release(seq)

    # --- steps ----------------------------------------------------------------------------------

    def plan(self, *, now_s: float) -> StepPlan | None:
        """The next step, or None if nothing can run now, or nothing should before a result is here."""
        assert self.can_plan
        if self._steps and not self._overlap.should_plan(
            self._steps, self._running, self._speculator, self.times
        ):
            return None
        self._now_s = now_s
        self._order.at(now_s, (*self._waiting, *self._running))
        while True:
            work, preempted = self._choose()
            if work:
                return self._begin(work)
            for victim in preempted:
                if victim.swap_slots:
                    self._tables.cancel_swap_out(victim)
            if not preempted:
                return None
            # All that could run gave way; in the room they left somebody else can.

    def _choose(self) -> tuple[list[Work], list[Sequence]]:
        """The work of the next step, and the sequences that were preempted for it."""
        self._is_head_blocked = False
        self._seat_joined()
        decodes = self._pick_decodes()
        preempted: list[Sequence] = []
        if not self._steps:
            decodes, preempted = self._with_room(decodes)
        elif not self._fits(decodes):
            return [], []  # somebody must give way, and nobody can while a step uses its blocks
        work = self._with_drafts(decodes)
        room = prompt_room(self._engine, self.times, work)
        if self._overlap.stages > 1:
            room.limit(self._overlap.prompt_tokens_max(self.waiting_token_count(), self.times))
        # What was just preempted must not come straight back.
        self._fill(work, room, can_admit=not preempted or not work)
        return work, preempted

    def finish_step(self, result: StepResult) -> list[Progress]:
        """Take the result of the oldest step under way, and commit blocks that became full. Cancelled
        sequences release their blocks and are not reported."""
        step = self._steps.popleft()
        assert step.plan.step_number == result.step_number, "answer to another step"
        overlap_s = 0.0 if step.work.decodes else result.overlap_s
        self.times.observe(step.work, result.elapsed_s - overlap_s)
        self._tables.finish_moves(step.moves)
        progress: list[Progress] = []
        for seq, item, sampled in zip(step.sequences, step.plan.items, result.results, strict=True):
            self._advance(seq, item, sampled)
            if seq.is_dropped:
                self._tables.computed(seq)
                if not seq.steps_open:
                    self._dropped.remove(seq)
                    self._tables.release(seq)
                continue
            seq.take_prompt_logprobs(sampled.prompt_logprobs)
            tokens = seq.extend(sampled.tokens)
            self._tables.computed(seq)
            if seq.drafter is not None and sampled.drafts:
                seq.drafter.observe(seq.tokens)
                seq.drafter.offer(sampled.drafts)
            progress.append(Progress(seq, tokens, sampled.logprobs[: len(tokens)], sampled.embedding))
        return progress

    def _advance(self, seq: Sequence, item: StepItem, sampled: ItemResult) -> None:
        """Count what the step computed: draft tokens only as far as they were right."""
        assert bool(sampled.tokens) == (item.sample_index is not None)
        accepted_count = max(0, len(sampled.tokens) - 1)
        assert accepted_count <= item.draft_count
        seq.steps_open -= 1
        seq.computed_count += len(item.tokens) - item.draft_count + accepted_count
        if item.draft_count:
            seq.is_drafting = False
            seq.planned_count = seq.computed_count
            self.drafted_count += item.draft_count
            self.accepted_count += accepted_count
        if item.sample_index is not None:
            if seq.generated_here:
                self.tokens_per_step += GAIN_SMOOTHING * (len(sampled.tokens) - self.tokens_per_step)
            seq.sampling_count -= 1
            seq.generated_here = True

    def check(self) -> None:
        assert len(self._running) <= self._engine.batch_sequences_max
        for seq in self._waiting:
            assert not seq.block_ids
            assert bool(seq.swap_slots) == bool(seq.computed_count)
            assert not seq.steps_open
        for seq in (*self._joined, *self._running):
            assert seq.pending_count >= 0
            assert len(seq.block_ids) >= blocks_for(seq.planned_count, self._block_tokens)
        assert all(seq.steps_open and seq.is_dropped for seq in self._dropped)
        orders = [seq.order for seq in self._waiting]
        assert orders == sorted(orders)
        self._tables.check(list(self.sequences()), [step.moves for step in self._steps])

    # --- decodes --------------------------------------------------------------------------------

    def _seat_joined(self) -> None:
        """Sequences that hold all their KV take free seats, unless an older one waits and can run."""
        while self._joined and len(self._running) < self._engine.batch_sequences_max:
            oldest = next((s for s in self._waiting if self._may_enter(s)), None)
            if oldest is not None and oldest.order < self._joined[0].order and self._admit(oldest):
                continue
            self._running.append(self._joined.popleft())

    def _pick_decodes(self) -> list[Sequence]:
        """Sequences that decode, longest wait first, so that a budget smaller than the batch goes round. One
        token of the budget is left to prompts, so that decodes cannot starve them."""
        decodes = self._overlap.decodes(self._running, self._step_number, self._speculator, self.times)
        has_chunks = any(seq.is_runnable and seq.pending_count > 1 for seq in self._running)
        wants_admission = bool(self._waiting) and self._engine.step_tokens_max > 1
        budget = self._engine.step_tokens_max - (1 if has_chunks or wants_admission else 0)
        if len(decodes) > budget:
            decodes.sort(key=lambda seq: (seq.last_step, seq.order))
        return decodes[:budget]

    def _fits(self, decodes: list[Sequence]) -> bool:
        """Give each sequence the block that it needs. False if the pool ran out before all had theirs."""
        try:
            for seq in decodes:
                self._tables.grow(seq, seq.planned_count + 1)
        except OutOfBlocks:
            return False
        return True

    def _with_room(self, decodes: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(served, preempted). Victims stand lower than the sequence in need, or are it, so those served
        before keep what they got."""
        served: list[Sequence] = []
        preempted: list[Sequence] = []
        if self._fits(decodes):
            return decodes, preempted
        for seq in sorted(decodes, key=self._order.standing):
            while seq not in preempted and seq.planned_count >= self._tables.room_of(seq):
                try:
                    self._tables.grow(seq, seq.planned_count + 1)
                except OutOfBlocks:
                    if not self._tables.yield_block():
                        preempted.append(self._preempt_lowest())
            if seq not in preempted:
                served.append(seq)
        return served, preempted

    def _preempt_lowest(self) -> Sequence:
        able = (seq for seq in (*self._running, *self._joined) if seq.phase is not Phase.PREFILL)
        victim = max(able, key=self._order.standing)
        (self._running if victim in self._running else self._joined).remove(victim)
        if self._is_swap_cheaper(victim):
            self._tables.swap_out(victim)
            self.swap_count += 1
        else:
            self._tables.release(victim)
        if victim.last_step:
            self._ended.append(victim.key)
        victim.has_history = False
        victim.was_preempted = True
        self._preempted.append(victim)
        if victim.lacks_prompt_logprobs and not victim.swap_slots:
            victim.prompt_logprobs.clear()
        insort(self._waiting, victim, key=_by_age)
        self._is_head_blocked = True
        self.preemption_count += 1
        return victim

    def _is_swap_cheaper(self, seq: Sequence) -> bool:
        """True if swapping out and in again costs less than computing once more, by recent costs."""
        count = blocks_for(seq.computed_count, self._block_tokens)
        if not 0 < count <= self._tables.free_slot_count or self._tables.has_moves_to_come(seq):
            return False
        return 2 * count * self.times.moved_block_s < self.times.work_s(0, seq.computed_count)

    def _with_drafts(self, decodes: list[Sequence]) -> list[Work]:
        if not self._overlap.may_draft(self._steps, decodes):
            return [Work(seq, 1) for seq in decodes]
        budget = self._engine.step_tokens_max - len(decodes)
        if self._waiting or any(seq.runnable_count > 1 for seq in self._running):
            budget -= self._engine.chunk_tokens_min  # else drafts could keep prompts out for ever
        drafts = self._speculator.drafts(decodes, self.times, budget=max(0, budget))
        return [Work(seq, 1, self._that_fit(seq, found)) for seq, found in zip(decodes, drafts, strict=True)]

    def _that_fit(self, seq: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The drafts for which there is room. Drafts must not cost anybody blocks that are scarce."""
        end = seq.planned_count + 1 + len(drafts)
        missing_count = blocks_for(end, self._block_tokens) - len(seq.block_ids)
        if missing_count > 0 and self._pool.free_count - missing_count >= self._watermark():
            self._tables.grow(seq, end)
        return drafts[: self._tables.room_of(seq) - seq.planned_count - 1]

    # --- prompts --------------------------------------------------------------------------------

    def _fill(self, work: list[Work], room: PromptRoom, *, can_admit: bool) -> None:
        """Add chunks of running prompts and of those admitted now, best rank first. Every so often the
        oldest of those that run gets the first chunk, however long it is."""
        prompts = [seq for seq in self._running if seq.is_runnable and seq.pending_count > 1]
        prompts.sort(key=self._order.rank)
        if prompts:
            self._prompt_steps += 1
        if prompts and not room.is_full and self._prompt_steps % OLDEST_EVERY == 0:
            oldest = min(prompts, key=_by_age)
            prompts.remove(oldest)
            work.append(_chunk(oldest, room))
        while not room.is_full:
            seat_is_free = len(self._running) < self._engine.batch_sequences_max
            newcomer = self._next_waiting() if can_admit and seat_is_free else None
            if newcomer is not None and self._goes_first(newcomer, prompts):
                if not self._admit(newcomer):
                    can_admit = False
                    continue
                if not newcomer.is_runnable:
                    continue  # it waits, in its blocks, for content to come
                seq = newcomer
            elif prompts:
                seq = prompts.pop(0)
            else:
                return
            work.append(_chunk(seq, room))

    @property
    def _is_oldests_turn(self) -> bool:
        return self._admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _next_waiting(self) -> Sequence | None:
        """The sequence to admit next. Sequences whose prefix a sibling is computing are passed over."""
        able = (seq for seq in self._waiting if self._may_enter(seq))
        if self._is_oldests_turn:
            return next(able, None)
        return min(able, key=self._order.rank, default=None)

    def _may_enter(self, seq: Sequence) -> bool:
        is_asking = seq.incoming is not None and seq.incoming.wait_until_s > self._now_s
        return not is_asking and not self._tables.waits_for_sibling(seq)

    def _goes_first(self, newcomer: Sequence, prompts: list[Sequence]) -> bool:
        if not prompts or self._is_oldests_turn:
            return True
        newcomers: Rank = self._order.rank(newcomer)
        return newcomers < self._order.rank(prompts[0])

    def _admit(self, seq: Sequence) -> bool:
        try:
            self._tables.admit(seq, keep_free=self._watermark())
        except OutOfBlocks:
            self._is_head_blocked = True
            return False
        self._waiting.remove(seq)
        self._running.append(seq)
        self._admissions += 1
        return True

    # --- the step -------------------------------------------------------------------------------

    def _begin(self, work: list[Work]) -> StepPlan:
        self._step_number += 1
        ended, self._ended = tuple(self._ended), []
        moves = self._tables.take_moves()
        step_work = self._overlap.accounted(work_of(work, moves.block_count), work, self._running)
        items = tuple(self._item(one) for one in work)
        plan = StepPlan(
            items,
            self._step_number,
            copies=tuple(moves.copies),
            swap_out=tuple(moves.swap_out),
            swap_in=tuple(moves.swap_in),
            ended=ended,
        )
        sequences = [one.sequence for one in work]
        self._steps.append(OpenStep(plan, sequences, moves, step_work, self.times.predict_s(step_work)))
        return plan

    def _item(self, one: Work) -> StepItem:
        """The plan's item for this work, which counts as under way from now on."""
        seq = one.sequence
        wants_history = seq.sampling.needs_history or self._speculator.wants_history
        wants_history = wants_history and not seq.has_history
        item = item_of(one, gives_history=wants_history, want_drafts=self._speculator.drafts_wanted(seq))
        seq.last_step = self._step_number
        seq.steps_open += 1
        seq.planned_count += one.count
        seq.is_drafting = bool(one.drafts)
        seq.has_history |= item.history is not None
        cost = one.count
        if item.sample_index is not None:
            seq.sampling_count += 1
            cost = one.count - 1 + GENERATED_TOKEN_COST
        self._order.shares.charge(seq.fairness_key, cost)
        return item

    def _watermark(self) -> int:
        if not self._running and not self._joined:
            return 0
        return max(1, self._pool.block_count // WATERMARK_SHARE)

    def _number(self, seq: Sequence, now_s: float) -> None:
        self._arrivals += 1
        seq.order, seq.arrived_s = self._arrivals, now_s
        self._order.shares.join(seq.fairness_key)
        if seq.phase is not Phase.PREFILL and seq.task is Task.GENERATE:
            seq.drafter = self._speculator.drafter()


def _chunk(seq: Sequence, room: PromptRoom) -> Work:
    return Work(seq, room.take(seq.planned_count, seq.runnable_count))


def _by_age(seq: Sequence) -> int:
    return seq.order
