"""Continuous batching in macro steps: the production scheduler's rules, and one event per change.

A step with prompts in it is an event of its own; steps that only decode are advanced together, until the
batch changes. Order, budget, watermark, preemption and planning ahead follow `engine.scheduling`, whose parts
are used where they are cheap. Swapping, draft tokens and tails of part-filled blocks are left out.
"""

from bisect import insort
from collections import deque

from baton.config import EngineConfig
from baton.core.chunks import PromptRoom, room_s
from baton.core.costs import StepCosts, prompt_pairs
from baton.core.messages import Phase
from engine.scheduling.block_pool import OutOfBlocks
from engine.scheduling.order import GENERATED_TOKEN_COST, OLDEST_EVERY, TurnOrder
from engine.scheduling.overlap import OVERLAP_STEP_S_MAX
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import WATERMARK_SHARE
from simulator.clock import VirtualClock
from simulator.fleet.batch import DecodeBatch
from simulator.fleet.blocks import Blocks
from simulator.fleet.interface import EngineListener
from simulator.fleet.runs import Chunk, StepRun
from simulator.fleet.sequence import MacroSequence


class MacroEngine:
    def __init__(
        self,
        clock: VirtualClock,
        cache: PrefixCache,
        listener: EngineListener,
        *,
        costs: StepCosts,
        engine: EngineConfig,
        block_tokens: int,
    ) -> None:
        self._clock, self._cache, self._listener = clock, cache, listener
        self._pool = cache.pool
        self._costs, self._config, self._block_tokens = costs, engine, block_tokens
        self._seats = min(engine.batch_sequences_max, max(1, engine.step_tokens_max - 1))
        self._order = TurnOrder()
        self._waiting: list[MacroSequence] = []
        self._joined: deque[MacroSequence] = deque()
        self._prompts: list[MacroSequence] = []
        self._batch = DecodeBatch(block_tokens)
        self._blocks = Blocks(cache, block_tokens)
        self._dropping: list[MacroSequence] = []
        self._step_number = self._arrivals = self._admissions = self._prompt_steps = 0
        self._prioritised = 0
        self._run: StepRun | None = None
        self._version = 0
        self._is_head_blocked = False
        self._is_planning = False
        self._paused_until_s = 0.0
        self.preemption_count = 0
        self.step_s = 0.0
        """Time of the newest step."""
        self.busy_s = 0.0
        self.prompt_tokens_computed = 0

    # --- what others may know -------------------------------------------------------------------

    @property
    def running_count(self) -> int:
        return len(self._prompts) + len(self._batch) + len(self._joined)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def decoding_count(self) -> int:
        return len(self._batch) + len(self._joined)

    @property
    def context_tokens(self) -> int:
        run = self._run
        extra = sum(seq.computed_count for seq in self._joined)
        if run is None or run.count == 1:
            return self._batch.context_tokens + extra
        done = run.step_at(self._clock.now_s - run.start_s) - 1
        return self._batch.context_tokens + run.decodes * done + extra

    @property
    def waiting_tokens(self) -> int:
        prompts = sum(seq.pending_count for seq in self._prompts)
        return prompts + sum(seq.pending_count for seq in self._waiting)

    @property
    def keep_free(self) -> int:
        """Blocks that must stay free when others reserve."""
        if self._is_head_blocked and self._waiting:
            return self._pool.block_count
        return self._watermark()

    @property
    def is_head_blocked(self) -> bool:
        return self._is_head_blocked and bool(self._waiting)

    def prompt_s(self, start: int, end: int) -> float:
        return self._costs.prompt_s(start, end, chunk_tokens=self._config.step_tokens_max)

    @property
    def queue_s(self) -> float:
        """Predicted time of computing the prompts that are here."""
        present = (*self._prompts, *self._waiting)
        pairs = sum(prompt_pairs(seq.computed_count, seq.known_count) for seq in present)
        return self._costs.prompts_s(self.waiting_tokens, pairs)

    # --- coming and going -----------------------------------------------------------------------

    def add(self, seq: MacroSequence) -> None:
        """Take a sequence that holds nothing yet."""
        self._number(seq)
        self._waiting.append(seq)
        self._wake(seq)

    def join(self, seq: MacroSequence) -> None:
        """Take a sequence of which all but the newest token is computed, in blocks that become the
        engine's."""
        seq.generated_here = True
        assert seq.pending_count == 1
        self._number(seq)
        self._joined.append(seq)
        self._wake(seq)

    def remove(self, seq: MacroSequence) -> None:
        """Drop a sequence. Its blocks come back now, or when the step under way is done with them."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        elif seq in self._joined:
            self._joined.remove(seq)
        elif self._run is not None:
            self._dropping.append(seq)
            self.look_again()
            return
        else:
            self._drop(seq)
            self.look_again()
            return
        self._left(seq)
        self.look_again()

    def arrived(self, seq: MacroSequence) -> None:
        """Take note that a sequence's `incoming` moved."""
        if seq.is_running and self._blocks.arrived(seq):
            self._listener.committed(seq)
        self.look_again()

    def look_again(self) -> None:
        """Take note that blocks came free, or that blocks are there for which a sequence waited."""
        self._wake(None)

    def set_costs(self, costs: StepCosts) -> None:
        """Take other costs, from the next step on."""
        self._costs = costs
        self.look_again()

    def pause(self, until_s: float) -> None:
        """Compute nothing until then. The step under way ends later by as much."""
        before_s = max(self._clock.now_s, self._paused_until_s)
        self._paused_until_s = max(until_s, before_s)
        if (run := self._run) is not None:
            run.count = run.step_at(self._clock.now_s - run.start_s)
            run.pause_s += self._paused_until_s - before_s
            self._schedule(run)

    def stop(self) -> None:
        """End at once: nothing is computed any more, and nobody hears of it."""
        self._run, self._is_planning = None, True
        self._version += 1

    def _number(self, seq: MacroSequence) -> None:
        self._arrivals += 1
        seq.order, seq.arrived_s = self._arrivals, self._clock.now_s
        self._order.shares.join(seq.fairness_key)
        self._prioritised += seq.priority != 0

    def _left(self, seq: MacroSequence) -> None:
        self._order.shares.leave(seq.fairness_key)
        self._prioritised -= seq.priority != 0
        self._blocks.give_back(seq)

    def _wake(self, seq: MacroSequence | None) -> None:
        """Something changed: let the run end early enough to see it."""
        run = self._run
        if run is None:
            if seq is not None:
                seq.eligible_step = self._step_number + 1
            if not self._is_planning:
                self._plan()
            return
        step = run.step_at(self._clock.now_s - run.start_s)
        is_ahead = run.plans_ahead if step == run.count else self._overlaps(run.first_step_s)
        if seq is not None:
            seq.eligible_step = run.first_number + step + is_ahead
        if step + is_ahead < run.count:
            run.count = step + is_ahead
            self._schedule(run)

    def _overlaps(self, step_s: float) -> bool:
        return self._config.overlap_steps and step_s <= OVERLAP_STEP_S_MAX

    # --- steps ----------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Begin the next run, if anything can run."""
        assert self._run is None
        self._is_planning = True
        now_s, number = self._clock.now_s, self._step_number + 1
        present = (*self._waiting, *self._prompts) if self._prioritised else ()
        self._order.at(now_s, present)
        for step in (number, number + 1):
            # The second time nothing else could run, so no step was planned ahead of the newcomer.
            work, preempted = self._choose(step)
            while preempted and not work and not self._batch:
                work, preempted = self._choose(step)
            if work or self._batch:
                self._begin(work, number)
                break
        self._is_planning = False
        self._listener.planned()

    def _choose(self, step: int) -> tuple[list[Chunk], bool]:
        self._is_head_blocked = False
        self._seat_joined(step)
        preempted = self._grow_all()
        work: list[Chunk] = []
        if self._prompts or self._waiting:
            self._fill(work, self._room(), step, can_admit=not preempted or not self._batch)
        return work, preempted

    def _room(self) -> PromptRoom:
        """Return the room for prompts of the next step as `engine.scheduling.budget` does, from sums."""
        config, costs = self._config, self._costs
        decodes = len(self._batch)
        tokens = config.step_tokens_max - decodes
        limits = (slo_s or config.tpot_slo_s for slo_s in self._batch.objectives)
        slo_s = min((slo_s for slo_s in limits if slo_s > 0), default=0.0)
        decoding_s = costs.compute_s(decodes=decodes, context_tokens=self._batch.context_tokens)
        seconds = room_s(slo_s, decoding_s, floor_s=costs.floor_s)
        return PromptRoom(tokens, costs, seconds=seconds, least=config.chunk_tokens_min)

    def _begin(self, work: list[Chunk], number: int) -> None:
        decodes = len(self._batch)
        singles = prompt_tokens = pairs = context = 0
        for seq, count in work:
            start = seq.computed_count
            if count == 1:
                singles += 1
                context += start
            else:
                prompt_tokens += count
                pairs += prompt_pairs(start, start + count)
            if seq.first_step_s is None:
                seq.first_step_s = self._clock.now_s
            is_done = count == seq.pending_count
            self._order.shares.charge(seq.fairness_key, count + (GENERATED_TOKEN_COST - 1 if is_done else 0))
        first_s = self._costs.step_s(
            prompt_tokens=prompt_tokens,
            decodes=decodes + singles,
            context_tokens=self._batch.context_tokens + context,
            pairs=pairs,
        )
        count = 1 if work else self._steps_alike(number)
        growth_s = self._costs.context_token_s * decodes
        goes_on = decodes > 1 or any(
            chunk < seq.pending_count or seq.phase is not Phase.PREFILL for seq, chunk in work
        )
        is_ahead = self._overlaps(first_s) and goes_on
        self._version += 1
        start_s = max(self._clock.now_s, self._paused_until_s)
        run = StepRun(start_s, count, number, work, decodes, first_s, growth_s, is_ahead, self._version)
        self._run = run
        self._clock.at(run.start_s + run.seconds(count), self._end, run.version)

    def _steps_alike(self, number: int) -> int:
        """Return how many steps the batch can take together as it is."""
        if any(seq.eligible_step > number for seq in (*self._waiting, *self._joined)):
            return 1
        return self._batch.steps_alike()

    def _schedule(self, run: StepRun) -> None:
        self._version += 1
        run.version = self._version
        self._clock.at(run.start_s + run.seconds(run.count), self._end, run.version)

    def _end(self, version: int) -> None:
        run = self._run
        if run is None or version != run.version:
            return
        self._run = None
        self._is_planning = True
        count = run.count
        self.busy_s += run.seconds(count) - run.pause_s
        self.step_s = run.first_step_s + run.growth_s * (count - 1)
        self._step_number = run.first_number + count - 1
        second: list[MacroSequence] = []
        finished: list[MacroSequence] = []
        if run.decodes:
            for client, members in self._batch.clients.items():
                self._order.shares.charge(client, GENERATED_TOKEN_COST * count * members)
            second, finished = self._batch.advance(count)
        for seq in self._dropping:
            self._drop(seq)
        self._dropping.clear()
        for seq in second:
            if seq in self._batch:
                self._listener.second_token(seq)
        for seq in finished:
            if seq in self._batch:
                self._finish(seq)
        for seq, chunk in run.work:
            if seq.is_running:
                self._computed(seq, chunk)
        self._listener.step_ended()
        self._plan()

    def _drop(self, seq: MacroSequence) -> None:
        if not seq.is_running:
            return
        if seq in self._batch:
            self._batch.leave(seq)
        else:
            self._prompts.remove(seq)
        seq.is_running = False
        self._left(seq)

    # --- prompts --------------------------------------------------------------------------------

    def _computed(self, seq: MacroSequence, count: int) -> None:
        seq.computed_count += count
        seq.prompt_steps_tokens += count
        self.prompt_tokens_computed += count
        self._blocks.commit(seq)
        self._blocks.arrived(seq)
        if seq.pending_count == 0:
            self._sample(seq)
        else:
            self._listener.committed(seq)

    def _sample(self, seq: MacroSequence) -> None:
        self._prompts.remove(seq)
        seq.known_count += 1
        seq.generated_here = True
        self._blocks.break_promises(seq)
        is_first = seq.known_count == seq.start.prompt_token_count + seq.start.generated_count + 1
        is_over = seq.known_count >= seq.end_count
        if seq.phase is Phase.PREFILL:
            seq.is_running = False
            self._order.shares.leave(seq.fairness_key)
            self._prioritised -= seq.priority != 0
            self._listener.sampled(seq)
            return
        if is_first:
            self._listener.sampled(seq)
        if is_over:
            seq.is_running = False
            self._left(seq)
            self._listener.finished(seq)
        else:
            self._batch.enter(seq)

    def _fill(self, work: list[Chunk], room: PromptRoom, step: int, *, can_admit: bool) -> None:
        """Fill the step with chunks of prompts, as `Scheduler._fill` does."""
        block_tokens, rank = self._block_tokens, self._order.rank
        prompts = [seq for seq in self._prompts if seq.runnable_count(block_tokens) > 0]
        if len(prompts) > 1:
            prompts.sort(key=rank)
        if prompts:
            self._prompt_steps += 1
        if prompts and not room.is_full and self._prompt_steps % OLDEST_EVERY == 0:
            oldest = min(prompts, key=_by_age)
            prompts.remove(oldest)
            self._take(work, oldest, room)
        while not room.is_full:
            seat_is_free = len(self._prompts) + len(self._batch) < self._seats
            newcomer = self._next_waiting(step) if can_admit and seat_is_free else None
            if newcomer is not None and self._goes_first(newcomer, prompts):
                if not self._admit(newcomer):
                    can_admit = False
                    continue
                if newcomer.runnable_count(block_tokens) <= 0:
                    continue  # The sequence waits, in its blocks, for content to come.
                seq = newcomer
            elif prompts:
                seq = prompts.pop(0)
            else:
                return
            self._take(work, seq, room)

    def _take(self, work: list[Chunk], seq: MacroSequence, room: PromptRoom) -> None:
        work.append((seq, room.take(seq.computed_count, seq.runnable_count(self._block_tokens))))

    @property
    def _is_oldests_turn(self) -> bool:
        return self._admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _next_waiting(self, step: int) -> MacroSequence | None:
        able = [seq for seq in self._waiting if seq.eligible_step <= step and self._is_known(seq)]
        if len(able) > 1 and not self._is_oldests_turn:
            able.sort(key=self._order.rank)
        return next((seq for seq in able if not self._blocks.waits_for_sibling(seq)), None)

    def _is_known(self, seq: MacroSequence) -> bool:
        return seq.incoming is None or seq.incoming.wait_until_s <= self._clock.now_s

    def _goes_first(self, newcomer: MacroSequence, prompts: list[MacroSequence]) -> bool:
        if not prompts or self._is_oldests_turn:
            return True
        return self._order.rank(newcomer) < self._order.rank(prompts[0])

    def _admit(self, seq: MacroSequence) -> bool:
        try:
            self._blocks.admit(seq, keep_free=self._watermark())
        except OutOfBlocks:
            self._is_head_blocked = True
            return False
        self._waiting.remove(seq)
        self._prompts.append(seq)
        self._admissions += 1
        seq.is_running = True
        self._listener.admitted(seq)
        return True

    # --- decodes --------------------------------------------------------------------------------

    def _seat_joined(self, step: int) -> None:
        while self._joined and len(self._prompts) + len(self._batch) < self._seats:
            first = self._joined[0]
            if first.eligible_step > step:
                return
            oldest = next(
                (
                    s
                    for s in self._waiting
                    if s.eligible_step <= step and self._is_known(s) and not self._blocks.waits_for_sibling(s)
                ),
                None,
            )
            if oldest is not None and oldest.order < first.order and self._admit(oldest):
                continue
            self._joined.popleft()
            first.is_running = True
            self._batch.enter(first)

    def _finish(self, seq: MacroSequence) -> None:
        self._batch.leave(seq)
        seq.is_running = False
        self._left(seq)
        self._listener.finished(seq)

    def _grow_all(self) -> bool:
        """Reserve a block for each sequence that needs one; return whether any had to give way."""
        preempted = False
        while (seq := self._batch.take_growing()) is not None:
            while seq in self._batch:
                try:
                    seq.block_ids += self._pool.allocate(1)
                    self._batch.grown(seq)
                    break
                except OutOfBlocks:
                    self._preempt()
                    preempted = True
        return preempted

    def _preempt(self) -> None:
        able = (
            s for s in (*self._batch.members, *self._prompts, *self._joined) if s.phase is not Phase.PREFILL
        )
        victim = max(able, key=self._order.standing)
        if victim in self._batch:
            self._batch.leave(victim)
        elif victim in self._joined:
            self._joined.remove(victim)
        else:
            self._prompts.remove(victim)
        self._blocks.give_back(victim)
        victim.is_running = False
        victim.computed_count = victim.committed_count = 0
        insort(self._waiting, victim, key=_by_age)
        self._is_head_blocked = True
        self.preemption_count += 1

    def _watermark(self) -> int:
        if not self._prompts and not self._batch and not self._joined:
            return 0
        return max(1, self._pool.block_count // WATERMARK_SHARE)


def _by_age(seq: MacroSequence) -> int:
    return seq.order
