"""The workers as one router knows them: who they are, what they last reported, what was sent to them.

Load is counted by tickets. A ticket is issued for each leg when it is placed and taken back exactly
once. What a report may not show yet is added to it: a report that arrives after a placement can have
left the worker before, so a ticket counts on top of reports until the second one after it was issued.
"""

from collections.abc import Container, Iterable, Iterator

from baton.core.geometry import blocks_for
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Leg, LoadReport, PeerRef, Role, WorkerHello
from router.policy.views import SEQUENCE_TOKENS, WorkerView

REPORTS_UNTIL_SEEN = 2


class Ticket:
    """One leg of one sequence at one worker."""

    __slots__ = ("blocks", "leg", "report_number", "tokens")

    def __init__(self, *, leg: Leg, tokens: int, blocks: int, report_number: int) -> None:
        self.leg = leg
        self.tokens = tokens
        """Prompt tokens to compute; 0 once they are."""
        self.blocks = blocks
        self.report_number = report_number


class Charge:
    """A sum of tickets."""

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


class Worker:
    """One session's worth of knowledge about one worker."""

    def __init__(self, hello: WorkerHello, address: str) -> None:
        self.hello = hello
        self.address = address
        self.role = hello.role
        self.report: LoadReport | None = None
        self.report_at_s = float("-inf")
        self.has_refused = False
        """It refused a sequence for want of room since its last report."""
        self._is_drained_by_directory = False
        self._says_draining = False
        self.tickets: dict[SequenceId, Ticket] = {}
        self.in_flight = Charge()
        self._report_number = 0
        self._unseen = [Charge() for _ in range(REPORTS_UNTIL_SEEN)]
        """Tickets issued since the last report, since the one before it, …"""

    @property
    def worker_id(self) -> WorkerId:
        return self.hello.worker_id

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.worker_id, self.address)

    @property
    def is_draining(self) -> bool:
        return self._is_drained_by_directory or self._says_draining

    @property
    def free_blocks(self) -> int:
        """Free for a new sequence; negative when more was promised than there is."""
        free = self.hello.block_count if self.report is None else self.report.free_blocks
        return free - sum(charge.blocks for charge in self._unseen)

    @property
    def load(self) -> float:
        """See `WorkerView.load`. Whichever is more, our own tickets or all routers' as reported."""
        mine = self.in_flight
        if self.report is None:
            return mine.tokens + SEQUENCE_TOKENS * mine.sequences
        tokens = self.report.waiting_tokens
        sequences = self.report.running_count + self.report.waiting_count
        for charge in self._unseen:
            tokens += charge.tokens
            sequences += charge.sequences
        return max(mine.tokens, tokens) + SEQUENCE_TOKENS * max(mine.sequences, sequences)

    def is_stale(self, *, now_s: float, silence_s: float) -> bool:
        return now_s - self.report_at_s > silence_s

    def heard(self, report: LoadReport, *, now_s: float) -> None:
        self.report, self.report_at_s = report, now_s
        self.role = report.role
        self._says_draining = report.is_draining
        self.has_refused = False
        self._report_number += 1
        self._unseen = [Charge(), *self._unseen[:-1]]

    def updated(self, role: Role, is_draining: bool) -> None:
        self.role = role
        self._is_drained_by_directory = is_draining

    def refused(self, *, is_draining: bool) -> None:
        """It gets nothing more before it reports again."""
        self.has_refused = True
        self._says_draining = self._says_draining or is_draining

    def issue(self, seq_id: SequenceId, *, leg: Leg, tokens: int, blocks: int) -> None:
        assert seq_id not in self.tickets, f"{seq_id} is at {self.worker_id} already"
        ticket = Ticket(leg=leg, tokens=tokens, blocks=blocks, report_number=self._report_number)
        self.tickets[seq_id] = ticket
        self._count(ticket, sequences=1, tokens=tokens, blocks=blocks)

    def prefilled(self, seq_id: SequenceId) -> None:
        """The prompt is computed; the sequence goes on. A second time changes nothing."""
        ticket = self.tickets[seq_id]
        self._count(ticket, sequences=0, tokens=-ticket.tokens, blocks=0)
        ticket.tokens = 0

    def take_back(self, seq_id: SequenceId) -> None:
        ticket = self.tickets.pop(seq_id)
        self._count(ticket, sequences=-1, tokens=-ticket.tokens, blocks=-ticket.blocks)

    def _count(self, ticket: Ticket, *, sequences: int, tokens: int, blocks: int) -> None:
        self.in_flight.add(sequences=sequences, tokens=tokens, blocks=blocks)
        age = self._report_number - ticket.report_number
        if age < REPORTS_UNTIL_SEEN:
            self._unseen[age].add(sequences=sequences, tokens=tokens, blocks=blocks)

    def check(self) -> None:
        tickets = self.tickets.values()
        assert self.in_flight.values == _sums(tickets)
        for age, charge in enumerate(self._unseen):
            assert charge.values == _sums(t for t in tickets if self._report_number - t.report_number == age)


def _sums(tickets: Iterable[Ticket]) -> tuple[int, int, int]:
    listed = list(tickets)
    return len(listed), sum(t.tokens for t in listed), sum(t.blocks for t in listed)


class ClusterView:
    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._workers: dict[WorkerId, Worker] = {}
        self._tickets: dict[SequenceId, tuple[WorkerId, ...]] = {}
        """Where each sequence has a ticket."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: WorkerId) -> Worker:
        return self._workers[worker_id]

    def get(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def join(self, hello: WorkerHello, address: str) -> None:
        assert hello.worker_id not in self._workers
        self._workers[hello.worker_id] = Worker(hello, address)

    def lose(self, worker_id: WorkerId) -> None:
        """Its tickets were taken back before."""
        assert not self._workers[worker_id].tickets
        del self._workers[worker_id]

    def issue(self, worker_id: WorkerId, seq_id: SequenceId, *, leg: Leg, tokens: int, blocks: int) -> None:
        self._workers[worker_id].issue(seq_id, leg=leg, tokens=tokens, blocks=blocks)
        self._tickets[seq_id] = (*self._tickets.get(seq_id, ()), worker_id)

    def take_back_except(self, seq_id: SequenceId, kept: Container[WorkerId]) -> bool:
        """Take back the sequence's tickets at all workers but `kept`; returns whether there were any."""
        holders = self._tickets.get(seq_id, ())
        gone = [w for w in holders if w not in kept]
        if not gone:
            return False
        for worker_id in gone:
            self._workers[worker_id].take_back(seq_id)
        left = tuple(w for w in holders if w in kept)
        if left:
            self._tickets[seq_id] = left
        else:
            del self._tickets[seq_id]
        return True

    def is_stale(self, worker: Worker, now_s: float) -> bool:
        return worker.is_stale(now_s=now_s, silence_s=self._silence_s)

    def views(
        self, token_count: int, *, avoid: frozenset[WorkerId], fingerprint: str, now_s: float
    ) -> list[WorkerView]:
        """For a sequence of `token_count` tokens, computed so far under `fingerprint` ("": none)."""
        return [self._view(w, token_count, avoid, fingerprint, now_s) for w in self._workers.values()]

    def _view(
        self, worker: Worker, token_count: int, avoid: frozenset[WorkerId], fingerprint: str, now_s: float
    ) -> WorkerView:
        hello = worker.hello
        # One more than known: the place of the token that is sampled next.
        blocks = blocks_for(token_count + 1, hello.block_tokens)
        return WorkerView(
            worker_id=hello.worker_id,
            role=worker.role,
            fingerprint=hello.fingerprint,
            block_tokens=hello.block_tokens,
            load=worker.load,
            is_draining=worker.is_draining,
            is_refusing=worker.has_refused,
            fits=token_count < hello.max_model_tokens and blocks <= hello.block_count,
            has_room=blocks <= worker.free_blocks and not worker.has_refused,
            is_stale=self.is_stale(worker, now_s),
            is_avoided=hello.worker_id in avoid,
            is_foreign=fingerprint not in ("", hello.fingerprint),
        )

    def check(self) -> None:
        for worker in self._workers.values():
            worker.check()
        held = {(s, w.worker_id) for w in self._workers.values() for s in w.tickets}
        assert held == {(s, w) for s, holders in self._tickets.items() for w in holders}
