"""The sequences that decode together: each gains one token per step, so a count of steps says all of them."""

from collections import Counter
from heapq import heappop, heappush

from simulator.fleet.sequence import MacroSequence

FINISH, GROW = 0, 1


class DecodeBatch:
    """A member's counts stay those of when it entered until it leaves."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.members: dict[MacroSequence, None] = {}
        self.context_tokens = 0
        """Positions that the next step reads."""
        self.fresh: list[MacroSequence] = []
        """Without a second token."""
        self.clients: Counter[str] = Counter()
        self.objectives: Counter[float] = Counter()
        """Seconds per token, 0 for none."""
        self._due: list[tuple[int, int, int, MacroSequence]] = []
        """(step, number of the entry, FINISH or GROW, whose)."""
        self._steps = self._due_number = 0

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, seq: object) -> bool:
        return seq in self.members

    def enter(self, seq: MacroSequence) -> None:
        self.members[seq] = None
        self.clients[seq.fairness_key] += 1
        self.objectives[seq.tpot_slo_s] += 1
        self.context_tokens += seq.computed_count
        seq.entered_at = self._steps
        if not seq.has_second_token:
            self.fresh.append(seq)
        self._push(self._finish_step(seq), FINISH, seq)
        self.grown(seq)

    def leave(self, seq: MacroSequence) -> None:
        """Its counts become those of now."""
        del self.members[seq]
        self.clients[seq.fairness_key] -= 1
        if not self.clients[seq.fairness_key]:
            del self.clients[seq.fairness_key]
        self.objectives[seq.tpot_slo_s] -= 1
        if not self.objectives[seq.tpot_slo_s]:
            del self.objectives[seq.tpot_slo_s]
        steps = self._steps - seq.entered_at
        seq.computed_count += steps
        seq.known_count += steps
        self.context_tokens -= seq.computed_count
        if seq in self.fresh:
            self.fresh.remove(seq)

    def grown(self, seq: MacroSequence) -> None:
        """It has the blocks that it has: note when a step would write past them."""
        if self._growth_step(seq) < self._finish_step(seq):
            self._push(self._growth_step(seq), GROW, seq)

    def advance(self, steps: int) -> tuple[list[MacroSequence], list[MacroSequence]]:
        """Who has a second token now, and who has all tokens. The latter are still members."""
        self._steps += steps
        self.context_tokens += len(self.members) * steps
        second = [seq for seq in self.fresh if seq.entered_at < self._steps]
        if second:
            self.fresh = [seq for seq in self.fresh if seq.entered_at >= self._steps]
            for seq in second:
                seq.has_second_token = True
        finished: list[MacroSequence] = []
        kept: list[tuple[int, int, int, MacroSequence]] = []
        while self._due and self._due[0][0] <= self._steps:
            entry = heappop(self._due)
            if entry[2] == GROW:
                kept.append(entry)
            elif self._is_valid(entry):
                finished.append(entry[3])
        for entry in kept:
            heappush(self._due, entry)
        return second, finished

    def take_growing(self) -> MacroSequence | None:
        """Somebody who needs a block for the next step; to be followed by `grown`, or by `leave`."""
        while self._due and self._due[0][0] <= self._steps:
            entry = heappop(self._due)
            if self._is_valid(entry):
                return entry[3]
        return None

    def steps_alike(self) -> int:
        """How many steps until somebody ends or needs a block; at least 1."""
        if self.fresh:
            return 1
        while self._due and not self._is_valid(self._due[0]):
            heappop(self._due)
        return max(1, self._due[0][0] - self._steps) if self._due else 1

    def _push(self, step: int, kind: int, seq: MacroSequence) -> None:
        self._due_number += 1
        heappush(self._due, (step, self._due_number, kind, seq))

    def _finish_step(self, seq: MacroSequence) -> int:
        return seq.entered_at + seq.end_count - seq.known_count

    def _growth_step(self, seq: MacroSequence) -> int:
        return seq.entered_at + len(seq.block_ids) * self._block_tokens - seq.computed_count

    def _is_valid(self, entry: tuple[int, int, int, MacroSequence]) -> bool:
        """Not of an earlier stay in the batch."""
        step, _, kind, seq = entry
        if seq not in self.members:
            return False
        return step == (self._finish_step(seq) if kind == FINISH else self._growth_step(seq))
