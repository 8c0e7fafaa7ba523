"""The sequences that decode together. Each gains one token per step, so one count of steps serves all of
them."""

from collections import Counter
from heapq import heappop, heappush

from simulator.fleet.sequence import MacroSequence

FINISH, GROW = 0, 1


class DecodeBatch:
    """The decoding batch. A member's own counts stay those of when it entered until it leaves."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.members: dict[MacroSequence, None] = {}
        self.context_tokens = 0
        """Positions that the next step reads."""
        self.fresh: list[MacroSequence] = []
        """Members that have no second token yet."""
        self.clients: Counter[str] = Counter()
        self.objectives: Counter[float] = Counter()
        """Members per objective in seconds per token, 0 for none."""
        self._due: list[tuple[int, int, int, MacroSequence]] = []
        """Heap of (step, number of the entry, FINISH or GROW, sequence)."""
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
        """Remove a member; its counts become those of now."""
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
        """Note when a step would write past the blocks that the member has."""
        if self._growth_step(seq) < self._finish_step(seq):
            self._push(self._growth_step(seq), GROW, seq)

    def advance(self, steps: int) -> tuple[list[MacroSequence], list[MacroSequence]]:
        """Take steps. Return the members that now have a second token, and those that have all tokens, which
        are still members."""
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
        """Return a member that needs a block for the next step; `grown` or `leave` must follow."""
        while self._due and self._due[0][0] <= self._steps:
            entry = heappop(self._due)
            if self._is_valid(entry):
                return entry[3]
        return None

    def steps_alike(self) -> int:
        """Return how many steps it takes until a member ends or needs a block; at least 1."""
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
        """Return whether the entry belongs to the sequence's present stay in the batch."""
        step, _, kind, seq = entry
        if seq not in self.members:
            return False
        return step == (self._finish_step(seq) if kind == FINISH else self._growth_step(seq))
