"""Compares a live run with a simulation of the same requests, and the router's predictions with both.

`baton serve` runs on the given cores with the bench model and answers the plan, open loop. Then the simulator
runs the same plan with the step costs that the workers report. A warm-up of requests that do not count comes
first, because predictions are judged after their first hundred.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import orjson

from baton.config import EngineConfig
from baton.config.base import Section
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from benchmarks import peers
from benchmarks.bench_model import FIRST_TOKEN, VOCAB
from loadgen.client import ServerUrl, request_bytes, send
from loadgen.lengths import PlannedRequest, ReplayPlan, TraceScaling, make_plan, time_scale_for
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.records import RequestRecord
from loadgen.report import Report, RunSettings, make_report
from loadgen.runner import ReplayObserver, replay_plan
from loadgen.slo import Slo
from loadgen.traces import Trace
from simulator.fleet.setup import Machine, PoolSizes, fleet_spec
from simulator.fleet.simulate import simulate
from simulator.fleet.workload import of_plan

TOKEN_BYTES = 12_288
"""KV of one token of the bench model in bf16."""
LINK_BYTES_S = 8e9
"""Bandwidth between two processes of one host."""
TIMEOUT_S = 120.0
CONNECTIONS_MAX = 1000
WARM_SEED, COUNTED_SEED = 1, 2


@dataclass(frozen=True, slots=True)
class FidelityLoad:
    trace: Trace
    warm_up: int
    """Requests before those that count, at half the rate."""
    rate: float
    input_scale: Fraction
    output_scale: Fraction
    input_tokens_max: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class FidelityResult:
    live: Report
    simulated: Report
    costs: dict[str, StepCosts]


def plans(load: FidelityLoad) -> tuple[ReplayPlan, ReplayPlan]:
    """(warm-up plan, counted plan). Raises SetupError if the trace is too short."""
    if len(load.trace.requests) < load.warm_up + 50:
        raise SetupError(
            f"the trace holds {len(load.trace.requests)} requests: it needs at least 50 beyond the warm-up"
        )
    parts = (load.trace.requests[: load.warm_up], load.trace.requests[load.warm_up :])
    return tuple(  # type: ignore[return-value]
        _plan(replace(load.trace, requests=part), load, rate, seed)
        for part, rate, seed in zip(parts, (load.rate / 2, load.rate), (WARM_SEED, COUNTED_SEED), strict=True)
    )


def _plan(trace: Trace, load: FidelityLoad, rate: float, seed: int) -> ReplayPlan:
    first_s = trace.requests[0].at_s
    trace = replace(trace, requests=tuple(replace(r, at_s=r.at_s - first_s) for r in trace.requests))
    scaling = TraceScaling(
        load.input_scale,
        load.output_scale,
        time_scale_for(trace, rate),
        input_tokens_max=load.input_tokens_max,
    )
    return make_plan(trace, scaling, spread=True, seed=seed)


async def run(
    model: Path,
    load: FidelityLoad,
    pools: PoolSizes,
    *,
    cores: Sequence[int],
    settings: Sequence[str],
    log: Path,
    progress: Callable[[str], None],
) -> FidelityResult:
    """Run the comparison. `settings` are "section.field=value" texts for both. Raises SetupError for wrong
    settings, or if Baton does not start."""
    warm, counted = plans(load)
    configs = _section(settings, "router", RouterConfig), _section(settings, "engine", EngineConfig)
    peer = _peer(model, pools, settings)
    progress(f"starting baton with {pools}")
    async with peers.running(peer, cores=cores, log=log) as running:
        server = running.url
        progress(f"warm-up: {len(warm.requests)} requests")
        await _replay(server, warm, load.slo, seed=WARM_SEED)
        progress(f"live: {len(counted.requests)} requests at {load.rate:g}/s")
        records = await _replay(server, counted, load.slo, seed=COUNTED_SEED)
        workers = await _workers(server)
    progress("simulated: the same requests")
    shown = RunSettings(
        trace="", target="live", model="bench-82m", slo=load.slo, planned=len(counted.requests)
    )
    live = make_report(records, shown)
    simulated = _simulate(counted, workers, pools, load.slo, shown, *configs)
    return FidelityResult(
        live, simulated, {str(w["id"]): _costs(w) for each in workers.values() for w in each}
    )


def _peer(model: Path, pools: PoolSizes, settings: Sequence[str]) -> peers.Peer:
    peer = peers.baton_peer(model, settings=[*settings, "engine.speculation=off", "store.host_bytes=0"])
    start = peer.command.index("--aggregated")
    counts = (
        "--prefill",
        str(pools.prefill),
        "--decode",
        str(pools.decode),
        "--aggregated",
        str(pools.aggregated),
    )
    command = (*peer.command[:start], *counts, *peer.command[start + 2 :])
    return replace(peer, command=tuple(part.replace("{threads}", "1") for part in command))


async def _replay(server: ServerUrl, plan: ReplayPlan, slo: Slo, *, seed: int) -> list[RequestRecord]:
    prompts = PromptMaker(plan, TokenRange(FIRST_TOKEN, VOCAB), seed=seed)
    asked: dict[str, object] = {"timings": True}
    asked |= {} if slo.ttft_s is None else {"ttft_ms": slo.ttft_s * 1e3}
    asked |= {} if slo.tpot_s is None else {"tpot_ms": slo.tpot_s * 1e3}

    def message(request: PlannedRequest) -> bytes:
        body: dict[str, object] = {
            "model": peers.MODEL_NAME,
            "prompt": prompts.tokens(request),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "baton": asked,
        }
        return request_bytes(server, "/v1/completions", orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))

    return await replay_plan(
        plan.requests,
        message,
        lambda message, record: send(server, message, record, timeout_s=TIMEOUT_S),
        connections_max=CONNECTIONS_MAX,
        observer=ReplayObserver(lambda _: None, lambda _: None),
        stop=asyncio.Event(),
    )


async def _workers(server: ServerUrl) -> dict[Role, list[dict[str, Any]]]:
    async with httpx.AsyncClient() as client:
        health = (await client.get(f"{server.origin}/health", timeout=10)).json()
    return {Role(role): workers for role, workers in health["workers"].items() if workers}


def _costs(worker: dict[str, Any]) -> StepCosts:
    if worker.get("costs") is None:
        raise SetupError(f"worker {worker['id']} does not report the costs of its steps")
    return msgspec.convert(worker["costs"], StepCosts)


S = TypeVar("S", bound=Section)


def _section(settings: Sequence[str], name: str, kind: type[S]) -> S:
    """The simulator's part of the live cluster's settings. Raises SetupError."""
    pairs = [text.removeprefix(f"{name}.").split("=", 1) for text in settings if text.startswith(f"{name}.")]
    try:
        return kind.model_validate(dict(pairs))
    except ValueError as error:
        raise SetupError(f"--set {name}: {error}") from error


def _simulate(
    plan: ReplayPlan,
    workers: dict[Role, list[dict[str, Any]]],
    pools: PoolSizes,
    slo: Slo,
    shown: RunSettings,
    router: RouterConfig,
    engine: EngineConfig,
) -> Report:
    costs = {role: _costs(found[0]) for role, found in workers.items()}
    blocks, block_tokens = (next(iter(workers.values()))[0][name] for name in ("blocks", "block_tokens"))
    machine = Machine(
        "live", costs, TOKEN_BYTES, TOKEN_BYTES * blocks * block_tokens, LINK_BYTES_S, LINK_BYTES_S
    )
    if slo.tpot_s is not None:
        engine = engine.model_copy(update={"tpot_slo_s": slo.tpot_s})
    spec = fleet_spec(
        machine,
        pools,
        block_tokens=block_tokens,
        router=router,
        engine=engine,
        slo_classes={"": (slo.ttft_s or 0.0, slo.tpot_s or 0.0)},
        hop_s=0.001,
    )
    trace_block_tokens = float(plan.block_tokens) or float(block_tokens)
    settings = replace(shown, target="simulated", kind="simulation")
    return simulate(spec, of_plan(plan), settings, trace_block_tokens=trace_block_tokens).report
