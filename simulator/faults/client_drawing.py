"""The clients of one seed: open-loop arrivals, shared prefixes, impatience."""

import random
from typing import Any

from baton.core.messages import AdapterRef
from simulator.faults.client import RequestKind, SimClient
from simulator.faults.model import VOCABULARY, text_of
from simulator.faults.scenario import MODEL_NAME, Scenario
from simulator.faults.tenancy import ADAPTERS, owner_of


def draw_clients(scenario: Scenario, rng: random.Random) -> list[SimClient]:
    """Draw all clients, in order of arrival."""
    prefixes = [_draw_tokens(rng, rng.randint(4, 32)) for _ in range(scenario.prefix_count)]
    arrivals = sorted(_draw_arrival(rng, scenario.arrivals_s) for _ in range(scenario.request_count))
    clients: list[SimClient] = []
    for number, arrives_s in enumerate(arrivals):
        client = _draw_client(f"r{number}", rng, prefixes, scenario)
        client.arrives_s = arrives_s
        client.router_index = rng.randrange(scenario.router_count)
        client.comes_back = rng.random() < 0.9
        if rng.random() < scenario.leave_chance:
            client.leaves_after_s = rng.choice((0.01, 0.1, 0.5, 1.5)) * rng.expovariate(1.0)
        client.is_hasty = rng.random() < 0.08
        client.is_slow = client.is_stream and rng.random() < 0.05
        if scenario.shape == "overload":
            _insist(client, rng)
        elif scenario.shape:
            _shape(client, number, rng, scenario)
        clients.append(client)
    return sorted(clients, key=lambda client: client.arrives_s)


def _insist(client: SimClient, rng: random.Random) -> None:
    """Make a client that comes again whenever it is told to."""
    client.kind, client.is_hasty, client.is_slow, client.comes_back = (
        RequestKind.COMPLETION,
        False,
        False,
        True,
    )
    client.prompts = (_draw_tokens(rng, rng.randint(14, 20)),)
    client.body = {
        "model": MODEL_NAME,
        "prompt": list(client.prompts[0]),
        "max_tokens": rng.randint(8, 12),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
    }


def _shape(client: SimClient, number: int, rng: random.Random, scenario: Scenario) -> None:
    """Make a client of a scenario that presses on the admission queue of a router."""
    client.kind, client.is_hasty, client.comes_back = RequestKind.COMPLETION, False, False
    is_victim = scenario.shape == "flood" and number < 4
    length = rng.randint(14, 20) if scenario.shape == "burst" or is_victim else rng.randint(4, 6)
    client.prompts = (_draw_tokens(rng, length),)
    client.body = {
        "model": MODEL_NAME,
        "prompt": list(client.prompts[0]),
        "max_tokens": rng.randint(5, 8) if scenario.shape == "burst" else 1,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "priority": rng.choice((1, 2, 3)) if scenario.shape == "burst" else 1,
        "stream": rng.random() < 0.5,
    }
    client.is_slow = False
    client.arrives_s = 0.5
    if scenario.shape == "flood":
        client.arrives_s = rng.uniform(0.5, 0.8)
        client.body |= (
            {"priority": 6} if is_victim else {"n": rng.randint(8, 10), "temperature": 0.8, "seed": number}
        )
        if is_victim:
            client.arrives_s = 0.52


def _draw_client(
    name: str, rng: random.Random, prefixes: list[tuple[int, ...]], scenario: Scenario
) -> SimClient:
    tenant = rng.choice(sorted(scenario.tenants))
    adapter = rng.choice(ADAPTERS[: scenario.adapter_count]) if _wants_adapter(rng, scenario) else None
    kind = _draw_kind(rng, scenario)
    count = rng.choice((2, 3, 6)) if rng.random() < (0.3 if kind is RequestKind.EMBEDDING else 0.03) else 1
    prompts = tuple(_draw_prompt(rng, prefixes, scenario) for _ in range(count))
    body = _draw_body(rng, kind, prompts, scenario, adapter)
    client = SimClient(
        name, kind=kind, prompts=prompts, body=body, tenant=tenant, owner=owner_of(tenant, adapter)
    )
    client.adapter = adapter
    client.loops = rng.random() < 0.3
    return client


def _wants_adapter(rng: random.Random, scenario: Scenario) -> bool:
    return rng.random() < 0.4 and scenario.adapter_count > 0


def _draw_kind(rng: random.Random, scenario: Scenario) -> RequestKind:
    draw = rng.random()
    if draw < 0.05:
        return RequestKind.EMBEDDING
    return RequestKind.BEAM if draw < 0.05 + scenario.beam_chance else RequestKind.COMPLETION


def _draw_body(
    rng: random.Random,
    kind: RequestKind,
    prompts: tuple[tuple[int, ...], ...],
    scenario: Scenario,
    adapter: AdapterRef | None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL_NAME if adapter is None else adapter.name}
    body["input" if kind is RequestKind.EMBEDDING else "prompt"] = (
        list(prompts[0]) if len(prompts) == 1 else [list(prompt) for prompt in prompts]
    )
    if kind is not RequestKind.EMBEDDING:
        body |= _draw_sampling(rng, kind, prompts, scenario)
    baton: dict[str, Any] = {}
    if (slo_class := rng.choice(("", "", "quick", "patient"))) and rng.random() < scenario.class_chance:
        baton["slo_class"] = slo_class
    if rng.random() < 0.05:
        baton["ttft_ms"] = rng.choice((50.0, 500.0, 5000.0))
    if baton:
        body["baton"] = baton
    if rng.random() < 0.5:
        body["priority"] = rng.choice((1, 1, 2, 6))
    if rng.random() < 0.3:
        body["user"] = rng.choice(("ann", "bob"))
    return body


def _draw_sampling(
    rng: random.Random, kind: RequestKind, prompts: tuple[tuple[int, ...], ...], scenario: Scenario
) -> dict[str, Any]:
    count, prompt_tokens = len(prompts), max(map(len, prompts))
    max_tokens = rng.choice((1, 1, 2, rng.randint(3, 24), rng.randint(3, 24), rng.randint(3, 24)))
    if prompt_tokens < scenario.context_max:
        max_tokens = min(max_tokens, scenario.context_max - prompt_tokens)
    body: dict[str, Any] = {"max_tokens": max_tokens, "return_token_ids": True}
    if kind is RequestKind.BEAM:
        body |= {
            "use_beam_search": True,
            "n": rng.choice((1, 2, 3)) if count == 1 else 1,
            "max_tokens": min(6, max_tokens),
        }
        return body
    is_greedy = rng.random() < 0.6
    body |= {"temperature": 0} if is_greedy else {"temperature": 0.8, "seed": rng.randrange(1 << 30)}
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.25:
        body["presence_penalty"] = 0.5
    if rng.random() < 0.25:
        body["logprobs"] = 0
    if rng.random() < scenario.choices_chance and count == 1:
        body["n"] = rng.choice((2, 2, 3, 5))
    if rng.random() < 0.6:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    elif rng.random() < 0.2:
        body["prompt_logprobs"] = 0
    elif rng.random() < 0.1:
        body["best_of"] = body.get("n", 1) + 1
    if rng.random() < 0.25 and "best_of" not in body:
        # Long answers of few letters meet a stop string now and then.
        length = rng.choice((1, 1, 2))
        body["stop"] = [text_of(_draw_tokens(rng, length)) for _ in range(rng.choice((1, 4)))]
    return body


def _draw_arrival(rng: random.Random, span_s: float) -> float:
    """Draw an instant. Half of the arrivals come in bursts, so that sequences of one prefix meet."""
    moment_s = rng.uniform(0.4, span_s)
    return round(moment_s) + rng.uniform(0, 0.02) if rng.random() < 0.5 else moment_s


def _draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


def _draw_prompt(rng: random.Random, prefixes: list[tuple[int, ...]], scenario: Scenario) -> tuple[int, ...]:
    if rng.random() < 0.03:
        return _draw_tokens(rng, scenario.max_model_tokens + rng.randint(1, 30))
    prefix = rng.choice(prefixes) if rng.random() < scenario.prefix_chance else ()
    if prefix and rng.random() < 0.2:
        return prefix  # the very same prompt again: a full hit
    return prefix + _draw_tokens(rng, rng.randint(1, 20))
