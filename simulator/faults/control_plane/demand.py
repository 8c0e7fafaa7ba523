"""Routers that tell the control plane what demand they see, and the demand itself."""

import random
from math import floor

from baton.core.costs import StepCosts
from baton.core.demand import Bin, ClassLoad, DemandReport, Traits, WorkerLoad, bin_of
from baton.core.ids import RouterId, WorkerId
from simulator.faults.control_plane.replicas import SimReplica
from simulator.faults.control_plane.scenario import MODEL, ControlScenario

PROMPT_TOKENS, OUTPUT_TOKENS = 4000, 200
KIND = Traits(StepCosts(0.02, 1e-4, 1e-4, 1e-9), chunk_tokens=2048, batch_max=128, pool_tokens=400_000)
PROMPT_S = KIND.costs.prompt_s(0, PROMPT_TOKENS, chunk_tokens=KIND.chunk_tokens)


class Demand:
    """Requests per second at each instant."""

    __slots__ = ("_levels", "_scenario")

    def __init__(self, scenario: ControlScenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._levels = [rng.choice((0.0, 0.1, 0.5, 1.0)) for _ in range(16)]

    def rate(self, at_s: float) -> float:
        scenario = self._scenario
        if at_s > scenario.churn_s:
            return (
                scenario.rate if scenario.demand == "steady" else 0.0 if scenario.demand == "silence" else 1.0
            )
        phase = at_s / scenario.demand_period_s
        match scenario.demand:
            case "steps":
                return scenario.rate * self._levels[int(phase) % len(self._levels)]
            case "flapping":
                return scenario.rate if int(phase) % 2 else 0.1
            case "silence":
                return scenario.rate if phase < 1 else 0.0
            case _:
                return scenario.rate


class SimDemandRouter:
    """One life of a router that reports. It shares the requests with its siblings."""

    __slots__ = (
        "_arrived",
        "_counted_until_s",
        "_missed",
        "_queued",
        "_share",
        "born_s",
        "is_alive",
        "reported_s",
        "router_id",
        "seen",
        "silent_until_s",
        "watch",
    )

    def __init__(self, router_id: RouterId, *, share: float, now_s: float) -> None:
        self.router_id = router_id
        self.is_alive = True
        self.silent_until_s = 0.0
        self.watch: tuple[str, int] | None = None
        """The control plane's life and the number of the watch that it gave."""
        self.reported_s = 0.0
        self.born_s = self._counted_until_s = now_s
        self._share = share
        self._arrived = self._missed = 0.0
        self._queued = 0.0
        self.seen = 0
        """Requests that were in the newest report."""

    def count(self, rate: float, *, serving: int, now_s: float) -> None:
        """Count what came since the last call, where so many workers compute prompts."""
        came = rate * self._share * (now_s - self._counted_until_s)
        self._counted_until_s = now_s
        self._arrived += came
        if rate * PROMPT_S > serving:
            self._missed += came
        self._queued = 0.0 if serving else self._queued + came

    @property
    def queued(self) -> int:
        return floor(self._queued)

    def report(self, workers: list[SimReplica], rate: float, *, now_s: float) -> DemandReport:
        requests = self.seen = floor(self._arrived)
        self.reported_s = now_s
        tokens = requests * OUTPUT_TOKENS
        load = ClassLoad(
            {bin_of(PROMPT_TOKENS): Bin(requests, requests * PROMPT_TOKENS)} if requests else {},
            started=requests,
            started_prompt_tokens=requests * PROMPT_TOKENS,
            ttft_missed=min(requests, floor(self._missed)),
            ended=requests,
            output_tokens=tokens,
            context_tokens=tokens * (PROMPT_TOKENS + OUTPUT_TOKENS // 2),
        )
        return DemandReport(
            router_id=self.router_id,
            up_s=now_s - self.born_s,
            classes={"": load} if requests else {},
            queued=self.queued,
            queued_prompt_tokens=self.queued * PROMPT_TOKENS,
            workers=tuple(_load_of(worker, rate, len(workers)) for worker in workers),
            model=MODEL,
        )


def _load_of(worker: SimReplica, rate: float, count: int) -> WorkerLoad:
    decoding = int(rate * OUTPUT_TOKENS * 0.03 / max(1, count)) if worker.role.decodes else 0
    return WorkerLoad(
        WorkerId(worker.worker_id),
        worker.role,
        age_s=0.1,
        waiting_tokens=0,
        decoding=decoding,
        context_tokens=decoding * PROMPT_TOKENS,
        held_share=0.1,
        traits=KIND,
    )
