"""Clients with open-loop arrivals and shared prefixes, some of them impatient. Each knows what it must
receive."""

import random
from enum import StrEnum, auto

import msgspec

from baton.core.ids import RequestId, SequenceId
from baton.core.messages import Task
from baton.core.sampling import SamplingParams
from simulator.faults.model import EOS, VOCABULARY, Expected
from simulator.faults.scenario import Scenario


class Ending(StrEnum):
    """The way in which a client's request ended."""

    FINISHED = auto()
    FAILED = auto()
    GONE = auto()
    """The client left."""
    BROKEN = auto()
    """The client's router died."""
    REFUSED = auto()
    """The client came when no router listened."""


class SimClient:
    """One request, and what its client has seen of it."""

    __slots__ = (
        "arrives_s",
        "cached_token_count",
        "ended_s",
        "ending",
        "expected",
        "failure",
        "group",
        "leaves_after_s",
        "placements",
        "priority",
        "prompt",
        "received",
        "router_index",
        "salt",
        "sampling",
        "seq_id",
        "state",
        "task",
        "time_limit_s",
    )

    def __init__(
        self,
        number: int,
        *,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: int,
        context_max: int,
        loops: bool = False,
        task: Task = Task.GENERATE,
    ) -> None:
        self.seq_id = SequenceId(f"r{number}/0")
        self.prompt, self.sampling, self.salt = prompt, sampling, salt
        self.arrives_s = 0.0
        self.time_limit_s = 60.0
        self.leaves_after_s: float | None = None
        self.router_index = 0
        self.received: list[int] = []
        self.ending: Ending | None = None
        self.ended_s = 0.0
        self.failure = ""
        self.state = "queued"
        self.placements = 0
        self.cached_token_count = 0
        self.expected = Expected(prompt, sampling, salt, context_max=context_max, loops=loops, task=task)
        self.task, self.priority, self.group = task, 0, ""

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.seq_id.split("/", 1)[0])

    @property
    def salt_bytes(self) -> bytes:
        return b"tenant-%d" % self.salt


def draw_clients(scenario: Scenario, rng: random.Random) -> list[SimClient]:
    """Draw all clients, in order of arrival."""
    prefixes = [_draw_tokens(rng, rng.randint(4, 32)) for _ in range(scenario.prefix_count)]
    arrivals = sorted(_draw_arrival(rng, scenario.arrivals_s) for _ in range(scenario.request_count))
    clients: list[SimClient] = []
    for number, arrives_s in enumerate(arrivals):
        client = SimClient(
            number,
            prompt=_draw_prompt(rng, prefixes, scenario),
            sampling=_draw_sampling(rng),
            salt=rng.randrange(scenario.salt_count),
            context_max=scenario.context_max,
            loops=rng.random() < 0.3,
            task=Task.EMBED if rng.random() < 0.05 else Task.GENERATE,
        )
        client.priority = rng.choice((0, 0, 1, 5))
        if clients and rng.random() < scenario.sibling_chance:
            client = _sibling(number, clients[-1], scenario)
        client.arrives_s = clients[-1].arrives_s if client.group else arrives_s
        client.router_index = rng.randrange(scenario.router_count)
        if rng.random() < scenario.leave_chance:
            client.leaves_after_s = rng.choice((0.01, 0.1, 0.5, 1.5)) * rng.expovariate(1.0)
        if rng.random() < 0.08:
            client.time_limit_s = rng.uniform(0.05, 2.0)
        clients.append(client)
    return clients


def _sibling(number: int, of: SimClient, scenario: Scenario) -> SimClient:
    """Make another choice of the same request: the same prompt at the same moment, with another seed."""
    sampling = msgspec.structs.replace(of.sampling, seed=number, temperature=0.8)
    client = SimClient(
        number,
        prompt=of.prompt,
        sampling=sampling,
        salt=of.salt,
        context_max=scenario.context_max,
        loops=of.expected.loops,
        task=of.task,
    )
    of.group = of.group or f"group-{number}"
    client.group, client.priority = of.group, of.priority
    return client


def _draw_arrival(rng: random.Random, span_s: float) -> float:
    """Draw an instant. Half of the arrivals come in bursts, so that siblings of a prefix meet."""
    moment_s = rng.uniform(0.4, span_s)
    return round(moment_s) + rng.uniform(0, 0.02) if rng.random() < 0.5 else moment_s


def _draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def _draw_prompt(rng: random.Random, prefixes: list[tuple[int, ...]], scenario: Scenario) -> tuple[int, ...]:
    if rng.random() < 0.03:
        return _draw_tokens(rng, scenario.max_model_tokens + rng.randint(1, 30))
    prefix = rng.choice(prefixes) if rng.random() < scenario.prefix_chance else ()
    if prefix and rng.random() < 0.2:
        return prefix  # the very same prompt again: a full hit
    return prefix + _draw_tokens(rng, rng.randint(1, 20))


def _draw_sampling(rng: random.Random) -> SamplingParams:
    is_greedy = rng.random() < 0.6
    return SamplingParams(
        max_tokens=rng.choice((1, 1, 2, rng.randint(3, 24), rng.randint(3, 24), rng.randint(3, 24))),
        temperature=0.0 if is_greedy else 0.8,
        seed=0 if is_greedy else rng.randrange(1 << 30),
        stop_token_ids=(EOS,),
        ignore_eos=rng.random() < 0.3,
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
        logprobs=rng.choice((None, None, None, 0)),
        prompt_logprobs=0 if rng.random() < 0.08 else None,
    )
