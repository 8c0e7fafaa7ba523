"""A small simulated cluster for the autoscaler: replicas come after a delay, and requests miss objectives as
theory predicts."""

from random import Random

from baton.core.costs import StepCosts
from baton.core.demand import Bin, ClassLoad, Traits, bin_of
from baton.core.messages import Role
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.sizing import PromptGroup, prompts_missed
from control_plane.autoscaler.values import (
    AutoscalerSettings,
    LatencyObjective,
    Observation,
    PoolBounds,
    RoleState,
)

KIND = Traits(StepCosts(0.02, 1e-4, 1e-4, 1e-9), chunk_tokens=2048, batch_max=128, pool_tokens=400_000)
TRAITS = {Role.PREFILL: KIND, Role.DECODE: KIND}
OBJECTIVE = LatencyObjective(2.0, 0.03)
PROMPT, OUTPUT = 4000, 300


def settings(**more):
    values = {
        "bounds": {Role.PREFILL: PoolBounds(1, 20), Role.DECODE: PoolBounds(1, 20)},
        "objectives": {"": OBJECTIVE},
        "start_s": 120.0,
        "patience_s": 300.0,
    }
    return AutoscalerSettings(**{**values, **more})


def load_of(requests, *, prompt=PROMPT, output=OUTPUT, missed=0):
    if not requests:
        return {}
    return {
        "": ClassLoad(
            {bin_of(prompt): Bin(requests, requests * prompt)},
            started=requests,
            started_prompt_tokens=requests * prompt,
            ttft_missed=missed,
            ended=requests,
            output_tokens=requests * output,
            context_tokens=requests * output * (prompt + output // 2),
        )
    }


def observed(at_s, requests, states, *, prompt=PROMPT, output=OUTPUT, missed=0, **more):
    return Observation(
        at_s, 15.0, load_of(requests, prompt=prompt, output=output, missed=missed), states, **more
    )


class SimulatedCluster:
    """A simulated cluster that follows the autoscaler's decisions: starts after `start_s`, role switches
    after `switch_s`, stops at once."""

    def __init__(self, config, *, prefill=4, decode=4, seed=0, start_s=120.0, switch_s=20.0):
        self.scaler = Autoscaler(config)
        self.counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.starting = []
        self.rng = Random(seed)
        self.start_s, self.switch_s = start_s, switch_s
        self.at_s = 0.0
        self.decisions = []
        self.switching = []

    def states(self):
        return {
            role: RoleState(
                serving=count,
                starting=sum(r is role for _, r in self.starting),
                joining=sum(r is role for _, r in self.switching),
            )
            for role, count in self.counts.items()
        }

    def step(self, rate, *, prompt=PROMPT, output=OUTPUT, noise=True, **more):
        self.at_s += 15.0
        self._arrive()
        mean = rate * 15.0
        requests = poisson(self.rng, mean) if noise else round(mean)
        work = rate * KIND.costs.prompt_s(0, prompt, chunk_tokens=KIND.chunk_tokens)
        share = prompts_missed(
            [PromptGroup(1.0, work / max(rate, 1e-9), OBJECTIVE.ttft_s)],
            work=work,
            servers=self.counts[Role.PREFILL],
        )
        missed = sum(self.rng.random() < share for _ in range(requests))
        seen = observed(
            self.at_s, requests, self.states(), prompt=prompt, output=output, missed=missed, **more
        )
        decision = self.scaler.decide(seen, TRAITS)
        self.decisions.append(decision)
        if not decision.is_advice:
            self._perform(decision)
        return decision

    def _perform(self, decision):
        for switch_role in decision.switches:
            self.counts[switch_role.source] -= switch_role.count
            self.switching += [(self.at_s + self.switch_s, switch_role.target)] * switch_role.count
        for role in self.counts:
            self.starting += [(self.at_s + self.start_s, role)] * decision.starts[role]
            stops = decision.stops[role]
            unborn = [entry for entry in self.starting if entry[1] is role][:stops]
            for entry in unborn:
                self.starting.remove(entry)
            self.counts[role] -= stops - len(unborn)

    def _arrive(self):
        for waiting in (self.starting, self.switching):
            for entry in [e for e in waiting if e[0] <= self.at_s]:
                waiting.remove(entry)
                self.counts[entry[1]] += 1

    def run(self, minutes, rate, **more):
        for _ in range(round(minutes * 4)):
            self.step(rate(self.at_s) if callable(rate) else rate, **more)


def poisson(rng, mean):
    """Draw a Poisson number by counting exponential gaps; means here are small."""
    count, at = 0, rng.expovariate(1.0)
    while at < mean:
        count += 1
        at += rng.expovariate(1.0)
    return count
