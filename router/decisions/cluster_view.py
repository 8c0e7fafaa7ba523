"""The workers as one router knows them: who they are, what they last reported, what was sent to them.

Load is counted by tickets. A ticket is issued for each phase when it is placed and taken back exactly
once. A report that arrives after a placement may have left the worker before it, so a ticket counts on top
of reports until the second one after it was issued.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from math import exp
from typing import NamedTuple

from baton.core.costs import prompt_pairs
from baton.core.geometry import blocks_for
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import LoadReport, PeerRef, Phase, Role, WorkerHello
from baton.core.sharing import WorkerShare
from router.decisions.placement.views import SEQUENCE_TOKENS, WorkerView
from router.decisions.prediction.backlog import Backlog
from router.decisions.prediction.outlook import Outlook
from router.decisions.prediction.speed import Speed

REPORTS_UNTIL_SEEN = 2
RHO_S = 10.0
"""Seconds over which the share of time that prompts take is averaged."""
RHO_MAX = 0.95
USUAL_S = 20.0
"""Over how long the number of sequences that decode is averaged."""


class Load(NamedTuple):
    """What a sequence at a worker is, for predictions; `NO_LOAD` where nobody predicts."""

    full_tokens: int
    """Of prompt and what was generated before."""
    priority: int = 0
    tpot_slo_s: float = 0.0


NO_LOAD = Load(0)


class Ticket:
    """One phase of one sequence at one worker."""

    __slots__ = ("blocks", "has_begun", "load", "pairs", "phase", "report_number", "tokens")

    def __init__(self, *, phase: Phase, tokens: int, blocks: int, load: Load, report_number: int) -> None:
        self.phase = phase
        self.tokens = tokens
        """Prompt tokens to compute; 0 once they are."""
        self.blocks = blocks
        self.load = load
        self.has_begun = False
        """Its prompt is computed, or its KV has arrived."""
        full_tokens = max(load.full_tokens, tokens)
        self.pairs = prompt_pairs(full_tokens - tokens, full_tokens)
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

    def __init__(
        self,
        hello: WorkerHello,
        address: str,
        fleet: Iterable[Speed] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`fleet`: how fast the others of its fingerprint are. `on_change` hears of another role, or of
        draining."""
        self._on_change = on_change
        self.hello = hello
        self.address = address
        self.worker_id = hello.worker_id
        self.speed = Speed(hello.costs, fleet)
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
        self.elsewhere = WorkerShare(hello.worker_id)
        """What other routers have here and reports need not show yet."""
        self.backlog = Backlog()
        """Prompts of this router's that are not computed."""
        self.head_since_s = 0.0
        """When the worker began with the first of them, as far as is known."""
        self.decode_count = self.decode_context = self.joining_count = 0
        """Phases of this router's that decode here or will, their tokens, and those that do not yet."""
        self._whole_prompts = 0
        """Of these, those whose prompt is computed here first and is not yet."""
        self.tpot_slos: Counter[float] = Counter()
        """Of these; none left out."""
        self._reported_tokens = self._reported_decodes = self._reported_context = 0.0
        """Of other routers, from the last report."""
        self.last_placed_s = float("-inf")
        self.outlook: Outlook | None = None
        """None: something changed since predictions looked."""
        self._rho = 0.0
        self._rho_at_s = 0.0
        self.usual_decodes: float | None = None
        """How many sequences decode there, all routers' together, on average over time; None: it has not
        reported."""

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
        for charge in self._unseen:
            free -= charge.blocks
        return free - self.elsewhere.blocks

    @property
    def own_share(self) -> WorkerShare:
        """What this router has here and reports need not show yet."""
        sums = [sum(values) for values in zip(*(charge.values for charge in self._unseen), strict=True)]
        return WorkerShare(self.worker_id, *sums)

    @property
    def load(self) -> float:
        """See `WorkerView.load`. Whichever is more, our own tickets or all routers' as reported."""
        mine, tokens, sequences = self.in_flight, self.elsewhere.tokens, self.elsewhere.sequences
        if self.report is None:
            return mine.tokens + tokens + SEQUENCE_TOKENS * (mine.sequences + sequences)
        tokens += self.report.waiting_tokens
        sequences += self.report.running_count + self.report.waiting_count
        for charge in self._unseen:
            tokens += charge.tokens
            sequences += charge.sequences
        return max(mine.tokens, tokens) + SEQUENCE_TOKENS * max(mine.sequences, sequences)

    def is_stale(self, *, now_s: float, silence_s: float) -> bool:
        return now_s - self.report_at_s > silence_s

    def heard(self, report: LoadReport, *, now_s: float) -> None:
        self._average(report.decoding_count, now_s - self.report_at_s)
        self.report, self.report_at_s = report, now_s
        if (self.role, self._says_draining) != (report.role, report.is_draining):
            self.role, self._says_draining = report.role, report.is_draining
            self._on_change()
        self.has_refused = False
        self._report_number += 1
        self._unseen = [Charge(), *self._unseen[:-1]]
        self.speed.told(report.costs, report.tokens_per_step)
        self._count_others(report)
        self.outlook = None

    def _average(self, decoding: int, since_s: float) -> None:
        if self.usual_decodes is None:
            self.usual_decodes = float(decoding)
        else:
            self.usual_decodes += (1.0 - exp(-since_s / USUAL_S)) * (decoding - self.usual_decodes)

    def _count_others(self, report: LoadReport) -> None:
        """What the report has beyond our own; prompts are reported with their cached part."""
        backlog = self.backlog
        fresh_share = backlog.tokens / backlog.full_tokens if backlog.full_tokens else 1.0
        self._reported_tokens = max(0, report.waiting_tokens - backlog.full_tokens) * fresh_share
        told = report.decoding_count + report.incoming_count
        self._reported_decodes = max(0, told - (self.decode_count - self._whole_prompts))
        mean_context = report.context_tokens / max(1, report.decoding_count)
        self._reported_context = self._reported_decodes * mean_context

    @property
    def others_tokens(self) -> float:
        """Of prompts that other routers sent, to compute."""
        return self._reported_tokens + self.elsewhere.tokens

    @property
    def others_decodes(self) -> float:
        """Sequences of other routers that decode here, or will."""
        return self._reported_decodes + (self.elsewhere.sequences if self.role.decodes else 0)

    @property
    def others_context(self) -> float:
        """Their tokens, of those that the last report has."""
        return self._reported_context

    def rho(self, now_s: float) -> float:
        """Share of its time that prompts sent lately take."""
        return min(RHO_MAX, self._rho * exp((self._rho_at_s - now_s) / RHO_S))

    def placed(self, seconds: float, now_s: float) -> None:
        """A prompt was sent there that takes so long to compute."""
        self._rho = self._rho * exp((self._rho_at_s - now_s) / RHO_S) + seconds / RHO_S
        self._rho_at_s = self.last_placed_s = now_s

    def updated(self, role: Role, is_draining: bool) -> None:
        self.role = role
        self._is_drained_by_directory = is_draining
        self._on_change()

    def refused(self, *, is_draining: bool) -> None:
        """It gets nothing more before it reports again."""
        self.has_refused = True
        self._says_draining = self._says_draining or is_draining
        self._on_change()

    def issue(
        self,
        seq_id: SequenceId,
        *,
        phase: Phase,
        tokens: int,
        blocks: int,
        load: Load = NO_LOAD,
        now_s: float = 0.0,
    ) -> None:
        assert seq_id not in self.tickets, f"{seq_id} is at {self.worker_id} already"
        number = self._report_number
        ticket = Ticket(phase=phase, tokens=tokens, blocks=blocks, load=load, report_number=number)
        self.tickets[seq_id] = ticket
        self._count(ticket, sequences=1, tokens=tokens, blocks=blocks)
        if tokens:
            if not self.backlog.count:
                self.head_since_s = now_s
            self._change_backlog(ticket, is_new=True)
        if phase is not Phase.PREFILL:
            self._change_decodes(ticket, 1)
            self.joining_count += 1

    def prefilled(self, seq_id: SequenceId, now_s: float = 0.0) -> None:
        """The prompt is computed; the sequence goes on. A second time changes nothing."""
        ticket = self.tickets[seq_id]
        if ticket.has_begun:
            return
        ticket.has_begun = True
        self.outlook = None
        if ticket.phase is not Phase.PREFILL:
            self.joining_count -= 1
        if ticket.tokens:
            self._change_backlog(ticket, is_new=False)
            self.head_since_s = now_s
        self._count(ticket, sequences=0, tokens=-ticket.tokens, blocks=0)
        ticket.tokens = 0

    def take_back(self, seq_id: SequenceId) -> None:
        ticket = self.tickets.pop(seq_id)
        if ticket.tokens:
            self._change_backlog(ticket, is_new=False)
        if ticket.phase is not Phase.PREFILL:
            self._change_decodes(ticket, -1)
            self.joining_count -= not ticket.has_begun
        self._count(ticket, sequences=-1, tokens=-ticket.tokens, blocks=-ticket.blocks)

    @property
    def strictest_tpot_slo_s(self) -> float:
        """Of what decodes there, which its steps with prompts keep; 0: nothing, or nothing that minds."""
        limits = [slo_s for slo_s in self.tpot_slos if slo_s]
        if (default_s := self.hello.tpot_slo_s) and self._has_decodes_without_slo():
            limits.append(default_s)
        return min(limits, default=0.0)

    def _has_decodes_without_slo(self) -> bool:
        return self.decode_count > self.tpot_slos.total() or self.others_decodes > 0

    def _change_backlog(self, ticket: Ticket, *, is_new: bool) -> None:
        self.outlook = None
        self._whole_prompts += (1 if is_new else -1) * (ticket.phase is Phase.AGGREGATED)
        change = self.backlog.add if is_new else self.backlog.remove
        full_tokens = max(ticket.load.full_tokens, ticket.tokens)
        change(
            priority=ticket.load.priority, full_tokens=full_tokens, tokens=ticket.tokens, pairs=ticket.pairs
        )

    def _change_decodes(self, ticket: Ticket, sign: int) -> None:
        self.outlook = None
        load = ticket.load
        self.decode_count += sign
        self.decode_context += sign * load.full_tokens
        if load.tpot_slo_s:
            self.tpot_slos[load.tpot_slo_s] += sign
            if not self.tpot_slos[load.tpot_slo_s]:
                del self.tpot_slos[load.tpot_slo_s]

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
        fresh = [t for t in tickets if t.tokens]
        sums = [(t.tokens, t.pairs, 1, max(t.load.full_tokens, t.tokens)) for t in fresh]
        assert self.backlog.sums == tuple(map(sum, zip(*sums, strict=True))) if sums else (0, 0, 0, 0)
        decodes = [t for t in tickets if t.phase is not Phase.PREFILL]
        assert self.decode_count == len(decodes)
        assert self.joining_count == sum(not t.has_begun for t in decodes)
        assert self._whole_prompts == sum(t.phase is Phase.AGGREGATED for t in fresh)
        assert self.decode_context == sum(t.load.full_tokens for t in decodes)
        assert self.tpot_slos == Counter(t.load.tpot_slo_s for t in decodes if t.load.tpot_slo_s)


def _sums(tickets: Iterable[Ticket]) -> tuple[int, int, int]:
    listed = list(tickets)
    return len(listed), sum(t.tokens for t in listed), sum(t.blocks for t in listed)


class _Pools(NamedTuple):
    usable: list[Worker]
    prefill: list[Worker]
    decode: list[Worker]
    aggregated: list[Worker]
    has_pairs: bool
    kinds: list[tuple[str, int]]

    @classmethod
    def of(cls, usable: list[Worker]) -> "_Pools":
        prefill = [w for w in usable if w.role.prefills]
        decode = [w for w in usable if w.role.decodes]
        both = [w for w in usable if w.role is Role.AGGREGATED]
        meet = {w.hello.fingerprint for w in prefill} & {w.hello.fingerprint for w in decode}
        kinds = sorted({(w.hello.fingerprint, w.hello.block_tokens) for w in usable})
        return cls(usable, prefill, decode, both, bool(meet) and len(both) < len(usable), kinds)


class ClusterView:
    def __init__(self, *, silence_s: float) -> None:
        self._silence_s = silence_s
        self._workers: dict[WorkerId, Worker] = {}
        self._tickets: dict[SequenceId, tuple[WorkerId, ...]] = {}
        """Where each sequence has a ticket."""
        self._known_pools: _Pools | None = None

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
        fleet = [w.speed for w in self._workers.values() if w.hello.fingerprint == hello.fingerprint]
        self._workers[hello.worker_id] = Worker(hello, address, fleet, self._forget_pools)
        self._forget_pools()

    def lose(self, worker_id: WorkerId) -> None:
        """Its tickets were taken back before."""
        assert not self._workers[worker_id].tickets
        del self._workers[worker_id]
        self._forget_pools()

    # --- pools ------------------------------------------------------------------------------------

    def _forget_pools(self) -> None:
        self._known_pools = None

    @property
    def _pools(self) -> "_Pools":
        if self._known_pools is None:
            self._known_pools = _Pools.of([w for w in self._workers.values() if not w.is_draining])
        return self._known_pools

    @property
    def usable(self) -> list[Worker]:
        """That do not drain."""
        return self._pools.usable

    @property
    def prefill_pool(self) -> list[Worker]:
        """Of these, those that take prompts; those of role aggregated are in either pool."""
        return self._pools.prefill

    @property
    def decode_pool(self) -> list[Worker]:
        return self._pools.decode

    @property
    def aggregated_pool(self) -> list[Worker]:
        return self._pools.aggregated

    @property
    def is_all_aggregated(self) -> bool:
        return len(self._pools.aggregated) == len(self._pools.usable)

    @property
    def has_pairs(self) -> bool:
        """Somebody can prefill for somebody else who decodes: not among equals of role aggregated."""
        return self._pools.has_pairs

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """Fingerprints and tokens of a block that there are."""
        return self._pools.kinds

    # --- accounts ---------------------------------------------------------------------------------

    def issue(
        self,
        worker_id: WorkerId,
        seq_id: SequenceId,
        *,
        phase: Phase,
        tokens: int,
        blocks: int,
        load: Load = NO_LOAD,
        now_s: float = 0.0,
    ) -> None:
        worker = self._workers[worker_id]
        worker.issue(seq_id, phase=phase, tokens=tokens, blocks=blocks, load=load, now_s=now_s)
        self._tickets[seq_id] = (*self._tickets.get(seq_id, ()), worker_id)

    def __len__(self) -> int:
        return len(self._workers)

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
        return [self.view(w, token_count, avoid, fingerprint, now_s) for w in self._workers.values()]

    def view(
        self, worker: Worker, token_count: int, avoid: frozenset[WorkerId], fingerprint: str, now_s: float
    ) -> WorkerView:
        hello = worker.hello
        blocks = blocks_for(token_count + 1, hello.block_tokens)  # one more: the token sampled next
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
