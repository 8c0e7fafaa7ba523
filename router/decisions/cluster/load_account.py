"""The load account of one worker: this router's reservations, the worker's reports, other routers' load.

A reservation is made for each phase of a sequence when it is placed, and released exactly once. A report that
arrives after a placement can have left the worker before, so a reservation counts on top of reports until the
second one after it was made.
"""

from collections.abc import Iterable
from typing import NamedTuple

from baton.core.costs import prompt_pairs
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import LoadReport, Phase
from baton.core.sharing import UnreportedLoad

REPORTS_UNTIL_SEEN = 2
SEQUENCE_TOKENS = 64
"""Load is counted in prompt tokens still to compute; a sequence in flight weighs as much as this many."""


class SequenceProfile(NamedTuple):
    """What predictions for others need to know of a sequence that runs at a worker."""

    full_tokens: int
    """Tokens of the prompt and of what was generated before."""
    priority: int = 0
    tpot_slo_s: float = 0.0


NO_PROFILE = SequenceProfile(0)


class Reservation:
    """One phase of one sequence at one worker."""

    __slots__ = ("blocks", "has_begun", "pairs", "phase", "profile", "report_number", "tokens")

    def __init__(
        self, *, phase: Phase, tokens: int, blocks: int, profile: SequenceProfile, report_number: int
    ) -> None:
        self.phase = phase
        self.tokens = tokens
        """Prompt tokens to compute; 0 once they are computed."""
        self.blocks = blocks
        self.profile = profile
        self.has_begun = False
        """Its prompt is computed, or its KV has arrived."""
        full_tokens = self.full_tokens
        self.pairs = prompt_pairs(full_tokens - tokens, full_tokens)
        self.report_number = report_number

    @property
    def full_tokens(self) -> int:
        return max(self.profile.full_tokens, self.tokens)


class LoadTotal:
    """A sum of reservations."""

    __slots__ = ("blocks", "sequences", "tokens")

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.blocks = 0

    def add(self, *, sequences: int, tokens: int, blocks: int) -> None:
        self.sequences += sequences
        self.tokens += tokens
        self.blocks += blocks

    @property
    def values(self) -> tuple[int, int, int]:
        return self.sequences, self.tokens, self.blocks


class LoadFigures(NamedTuple):
    """One worker's load at one moment, as its account gives it."""

    free_blocks: int
    """Blocks that are free for a new sequence; negative when more is reserved than there is."""
    load_tokens: int
    """Prompt tokens to compute + SEQUENCE_TOKENS per sequence, those just placed included."""
    sequences: int
    """This router's sequences there."""
    tokens: int
    """Prompt tokens of this router that are not computed yet."""
    is_refusing: bool
    """The worker refused a sequence for want of room, and has not reported since."""
    last_placed_s: float
    report_at_s: float


class LoadAccount:
    """The account of one worker. Figures taken before a change are no longer true after it."""

    def __init__(self, worker_id: WorkerId, block_count: int) -> None:
        self._worker_id, self._block_count = worker_id, block_count
        self.report: LoadReport | None = None
        self.report_at_s = float("-inf")
        self.is_refusing = False
        self.reservations: dict[SequenceId, Reservation] = {}
        self.in_flight = LoadTotal()
        self._report_number = 0
        self._unseen = [LoadTotal() for _ in range(REPORTS_UNTIL_SEEN)]
        """Reservations made since the last report, since the one before it, …"""
        self.elsewhere = UnreportedLoad(worker_id)
        """Other routers' load here that the worker's reports need not show yet."""
        self.last_placed_s = float("-inf")

    @property
    def free_blocks(self) -> int:
        free = self._block_count if self.report is None else self.report.free_blocks
        for total in self._unseen:
            free -= total.blocks
        return free - self.elsewhere.blocks

    @property
    def load_tokens(self) -> int:
        """The larger of this router's own reservations and the load that is reported for all routers."""
        own, tokens, sequences = self.in_flight, self.elsewhere.tokens, self.elsewhere.sequences
        if self.report is None:
            return own.tokens + tokens + SEQUENCE_TOKENS * (own.sequences + sequences)
        tokens += self.report.waiting_tokens
        sequences += self.report.running_count + self.report.waiting_count
        for total in self._unseen:
            tokens += total.tokens
            sequences += total.sequences
        return max(own.tokens, tokens) + SEQUENCE_TOKENS * max(own.sequences, sequences)

    @property
    def own_unreported(self) -> UnreportedLoad:
        """This router's load here that the worker's reports need not show yet."""
        sums = [sum(values) for values in zip(*(total.values for total in self._unseen), strict=True)]
        return UnreportedLoad(self._worker_id, *sums)

    def figures(self) -> LoadFigures:
        return LoadFigures(
            self.free_blocks,
            self.load_tokens,
            self.in_flight.sequences,
            self.in_flight.tokens,
            self.is_refusing,
            self.last_placed_s,
            self.report_at_s,
        )

    def on_report(self, report: LoadReport, *, now_s: float) -> None:
        self.report, self.report_at_s = report, now_s
        self.is_refusing = False
        self._report_number += 1
        self._unseen = [LoadTotal(), *self._unseen[:-1]]

    def reserve(
        self, seq_id: SequenceId, *, phase: Phase, tokens: int, blocks: int, profile: SequenceProfile
    ) -> Reservation:
        assert seq_id not in self.reservations, f"{seq_id} is at {self._worker_id} already"
        made = Reservation(
            phase=phase, tokens=tokens, blocks=blocks, profile=profile, report_number=self._report_number
        )
        self.reservations[seq_id] = made
        self._count(made, sequences=1, tokens=tokens, blocks=blocks)
        return made

    def begin(self, reservation: Reservation) -> None:
        """The prompt is computed, or the KV is there; the sequence goes on."""
        reservation.has_begun = True
        self._count(reservation, sequences=0, tokens=-reservation.tokens, blocks=0)
        reservation.tokens = 0

    def release(self, seq_id: SequenceId) -> Reservation:
        released = self.reservations.pop(seq_id)
        self._count(released, sequences=-1, tokens=-released.tokens, blocks=-released.blocks)
        return released

    def _count(self, reservation: Reservation, *, sequences: int, tokens: int, blocks: int) -> None:
        self.in_flight.add(sequences=sequences, tokens=tokens, blocks=blocks)
        age = self._report_number - reservation.report_number
        if age < REPORTS_UNTIL_SEEN:
            self._unseen[age].add(sequences=sequences, tokens=tokens, blocks=blocks)

    def check(self) -> None:
        """Raises AssertionError if the totals are not the sums of the reservations."""
        made = self.reservations.values()
        assert self.in_flight.values == _sums(made)
        for age, total in enumerate(self._unseen):
            assert total.values == _sums(r for r in made if self._report_number - r.report_number == age)


def _sums(reservations: Iterable[Reservation]) -> tuple[int, int, int]:
    listed = list(reservations)
    return len(listed), sum(r.tokens for r in listed), sum(r.blocks for r in listed)
