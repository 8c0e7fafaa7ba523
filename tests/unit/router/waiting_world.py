"""Workers that compute prompts one after another, in virtual time, with the admission queue in front of
them."""

import heapq
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from baton.config.router import RouterConfig, SloConfig
from baton.core.geometry import blocks_for
from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import Phase
from baton.core.sampling import SamplingParams
from router.decisions.events import Failed, FailureKind, Submit
from router.decisions.flow import Flow, RequestState
from router.decisions.placement.interface import NoPlace, Placement
from router.decisions.placement.room import kept_for_others
from router.decisions.prediction.forecast import Forecast
from router.decisions.waiting import Waiting

RATE = 1000.0
"""Prompt tokens per second of one worker."""
BLOCK_TOKENS = 16


@dataclass
class Ask:
    at_s: float
    tokens: int = 100
    tenant: str = ""
    ttft_s: float = 1.0
    tpot_slo_s: float = 0.0
    weight: float = 1.0
    priority: int = 0
    refuse_late: bool = False
    returns: bool = False
    """True if the client comes back once after a refusal, at the time that it was given."""


@dataclass
class Asked:
    ask: Ask
    arrived_s: float
    is_return: bool = False
    placed_s: float | None = None
    first_token_s: float | None = None
    failed: Failed | None = None

    @property
    def is_met(self) -> bool:
        return self.first_token_s is not None and self.first_token_s - self.arrived_s <= self.ask.ttft_s

    @property
    def is_wasted(self) -> bool:
        """The prompt was computed in vain."""
        return self.first_token_s is not None and not self.is_met


@dataclass
class World:
    workers: int = 1
    config: RouterConfig = field(default_factory=RouterConfig)
    tpot_s: float = 0.02
    checks_every: int = 50
    blocks: int = 10**9
    """Blocks of each worker, of `BLOCK_TOKENS` each."""
    stays_s: float = 0.0
    """Time that a sequence holds its blocks after its first token."""
    keeps_room: bool = True
    """Tenants over their share must leave some room."""
    urgent_share: float = 1.0
    """Part of a worker's queue that urgent sequences wait for: it serves them before others."""

    def __post_init__(self):
        self.now_s = 0.0
        self.free_at_s = [0.0] * self.workers
        self.flows = {}
        self.asked = {}
        self.events = []
        self.count = itertools.count()
        self.cluster = {
            WorkerId(f"w{i}"): SimpleNamespace(
                worker_id=WorkerId(f"w{i}"),
                facts=SimpleNamespace(block_count=self.blocks, block_tokens=BLOCK_TOKENS, fingerprint="f"),
                load=SimpleNamespace(sequences=0, free_blocks=self.blocks),
                blocks_for=lambda tokens: blocks_for(tokens + 1, BLOCK_TOKENS),
            )
            for i in range(self.workers)
        }
        self.longest_tokens = 10**9
        self.waiting = Waiting(
            config=self.config,
            slo=SloConfig(),
            placing=self,
            flows=self.flows,
            start=self.start,
            settle=self.settle,
        )

    # --- what the waiting line needs --------------------------------------------------------------

    def find(self, flow, *, now_s, leaves_room=False):
        need = blocks_for(flow.token_count + 1, BLOCK_TOKENS)
        views = list(self.cluster.values())
        kept = kept_for_others(views, flow.token_count) if leaves_room else frozenset()
        able = [
            i for i, view in enumerate(views) if view.load.free_blocks >= need and view.worker_id not in kept
        ]
        if not able:
            return NoPlace("no worker has enough free blocks")
        at = min(able, key=lambda i: (self.free_at_s[i], i))
        wait_s = max(0.0, self.free_at_s[at] - now_s)
        wait_s *= self.urgent_share if flow.submit.priority < 0 else 1.0
        compute_s = flow.token_count / RATE
        left_s = flow.arrived_s + flow.submit.ttft_slo_s - now_s
        forecast = Forecast(
            wait_s,
            0.0,
            compute_s,
            0.0,
            0.0,
            self.tpot_s,
            self.tpot_s,
            0.1,
            0.1,
            float(wait_s + compute_s <= left_s),
            0.0,
        )
        return Placement(views[at], None, "least wait", forecast=forecast)

    def takes_new_beside(self, workers):
        return not self.cluster.keys() <= workers

    def start(self, flow, placement):
        at = int(placement.prefill.worker_id[1:])
        self.free_at_s[at] = max(self.now_s, self.free_at_s[at]) + flow.token_count / RATE
        self.asked[flow.submit.seq_id].placed_s = self.now_s
        self.count_at(placement.prefill.worker_id, flow, 1)
        self.push(self.free_at_s[at], "done", flow.submit.seq_id)
        phases = {placement.prefill.worker_id: Phase.AGGREGATED}
        return flow.start(
            phases,
            source=None,
            fingerprint="f",
            cache_root=b"",
            reason="",
            is_fallback=False,
            now_s=self.now_s,
        )

    def settle(self, flow):
        self.waiting.settle(flow, now_s=self.now_s)
        if flow.is_over:
            self.flows.pop(flow.submit.seq_id, None)
        elif flow.state is RequestState.QUEUED:
            self.push(flow.next_tick_s(self.now_s), "timer", flow.submit.seq_id)

    def count_at(self, worker_id, flow, sign):
        view = self.cluster[worker_id]
        view.load.sequences += sign
        view.load.free_blocks -= sign * blocks_for(flow.token_count + 1, BLOCK_TOKENS)

    # --- the world --------------------------------------------------------------------------------

    def push(self, at_s, what, payload):
        heapq.heappush(self.events, (at_s, next(self.count), what, payload))

    def run(self, asks, until_s=1e9):
        for i, ask in enumerate(asks):
            self.push(ask.at_s, "ask", (f"{i}", ask))
        while self.events or self.waiting.next_tick_s is not None:
            tick_s = self.waiting.next_tick_s
            if tick_s is not None and (not self.events or tick_s < self.events[0][0]):
                self.now_s = max(self.now_s, tick_s)
            else:
                at_s, _, what, payload = heapq.heappop(self.events)
                self.now_s = max(self.now_s, at_s)
                self.take_in(what, payload)
            if self.waiting.is_due(self.now_s):
                self.perform(self.waiting.scan(now_s=self.now_s))
            if next(self.count) % self.checks_every == 0:
                self.waiting.check()
            if self.now_s > until_s:
                break
        return list(self.asked.values())

    def take_in(self, what, payload):
        if what == "ask":
            name, ask = payload
            self.ask(name, ask)
            return
        flow = self.flows.get(payload)
        if flow is None:
            return
        if what == "done":
            self.asked[payload].first_token_s = self.now_s
            self.push(self.now_s + self.stays_s, "gone", payload)
        elif what == "gone":
            for worker_id in flow.phases:
                self.count_at(worker_id, flow, -1)
            self.perform(flow.on_client_gone(now_s=self.now_s))
            self.waiting.wants_scan = True
        elif flow.state is RequestState.QUEUED:
            hint_s = self.waiting.hint_s(flow, now_s=self.now_s) if flow.is_wait_over(self.now_s) else 1.0
            self.perform(flow.on_tick(now_s=self.now_s, retry_after_s=hint_s, waits_for=""))
        self.settle(flow)

    def ask(self, name, ask):
        seq_id = SequenceId(name)
        submit = Submit(
            seq_id, RequestId(name), range(ask.tokens), SamplingParams(max_tokens=1), b"", self.now_s + 600,
            ttft_slo_s=ask.ttft_s, tpot_slo_s=ask.tpot_slo_s, tenant=ask.tenant,
            weight=ask.weight, priority=ask.priority,
            refuse_late=ask.refuse_late, arrived_s=self.now_s, request_digest=name.split("+")[0],
        )  # fmt: skip
        flow = Flow(
            submit, arrival=next(self.count), attempts_max=8, queue_wait_s=self.config.queue_wait_s,
            now_s=self.now_s,
        )  # fmt: skip
        self.flows[seq_id] = flow
        self.asked[seq_id] = Asked(ask, self.now_s, is_return="+" in name)
        self.perform(self.waiting.arrive(flow, now_s=self.now_s))
        self.settle(flow)

    def perform(self, actions):
        for action in actions:
            if isinstance(action, Failed):
                asked = self.asked[action.seq_id]
                asked.failed = action
                may_return = asked.ask.returns and not asked.is_return
                if may_return and action.kind in (FailureKind.UNMET, FailureKind.QUEUE_FULL):
                    name = f"{action.seq_id}+"
                    # Retry-After is in whole seconds.
                    at_s = self.now_s + max(1, -(-action.retry_after_s // 1))
                    self.push(at_s, "ask", (name, asked.ask))


def poisson(rng: random.Random, rate, *, from_s=0.0, until_s=60.0, **ask):
    """Return requests at `rate` per second, of 40 to 160 tokens."""
    asks, at_s = [], from_s
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        asks.append(Ask(at_s, tokens=rng.randint(40, 160), **ask))
    return asks


def goodput(asked):
    return sum(one.is_met for one in asked) / max(1, len(asked))
