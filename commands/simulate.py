"""`baton simulate` replays a production trace on a modelled cluster, with the production router."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.config import AutoscaleConfig, Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.shape import Shape
from commands import simulate_options as o
from commands.autoscale import Advise, AutoscaleRule, HpaTarget, StartUp, check_options, scaled
from commands.settings import load_config
from commands.simulate_experts import (
    LOADS,
    ExpertLoad,
    LoseNode,
    NodeBack,
    NodeGpus,
    OncePerNode,
    check_expert_options,
)
from commands.simulate_options import SimulateOptions
from commands.simulate_pools import pools_and_shape
from commands.simulate_show import Outputs, live_progress, publish
from loadgen.lengths import (
    ReplayPlan,
    TraceScaling,
    factor_text,
    make_plan,
)
from loadgen.report import RunSettings
from loadgen.slo import NO_TARGET_S, ClassObjectives
from loadgen.sources import SYNTH, name_of, open_trace
from loadgen.traces import Trace, cut
from simulator.experts.layout import NODE_GPUS
from simulator.fleet.expert_cluster import NODE_BACK_S, ExpertCluster, ExpertClusterSpec
from simulator.fleet.fleet import Fleet
from simulator.fleet.scaling import FleetScaling
from simulator.fleet.setup import (
    BATCH_SEQUENCES,
    STEP_TOKENS,
    Machine,
    PoolSizes,
    block_tokens_of,
    fleet_spec,
    machine_of,
    read_costs,
    with_costs,
)
from simulator.fleet.simulate import Simulated, attains, faster, search
from simulator.fleet.simulate import simulate as run
from simulator.fleet.spec import FleetSpec, StoreSpec
from simulator.fleet.workload import of_plan
from simulator.hardware import Node, find_gpu
from simulator.models import find_model


def simulate(
    trace: o.TraceName,
    model: o.Model = "llama-3-70b",
    gpu: o.Gpu = "h100",
    tp: o.Tp = None,
    pp: o.Pp = None,
    weight_bytes: o.WeightBytes = 2.0,
    prefill: o.Prefill = "0",
    decode: o.Decode = "0",
    aggregated: o.Aggregated = "0",
    policy: o.Policy = "",
    ttft_slo: o.Ttft = 10.0,
    tpot_slo: o.Tpot = 0.1,
    class_slos: o.Classes = [],  # noqa: B006 - typer copies it
    rate: o.Rate = None,
    time_scale: o.TimeScale = "1",
    length_scale: o.LengthScale = "1",
    output_scale: o.OutputScale = "",
    limit: o.Limit = None,
    start: o.Start = 0.0,
    duration: o.Duration = inf,
    copies: o.Copies = 1,
    spread: o.Spread = True,
    block_tokens: o.BlockTokens = 0,
    step_tokens: o.StepTokens = STEP_TOKENS,
    batch: o.Batch = BATCH_SEQUENCES,
    kv_gb: o.KvSize = 0.0,
    costs: o.Costs = None,
    link_gb_s: o.Link = 0.0,
    store_gb: o.StoreSize = 0.0,
    ssd_gb: o.SsdSize = 0.0,
    heartbeat: o.Heartbeat = 0.25,
    hop: o.Hop = 0.0002,
    cells: o.Cells = 1,
    seed: o.Seed = 0,
    sets: o.Sets = [],  # noqa: B006 - typer copies it
    search_rate: Annotated[bool, typer.Option("--search", help=o.SEARCH)] = False,
    attain: o.Attain = 0.9,
    autoscale: AutoscaleRule = "",
    start_up: StartUp = None,
    hpa_target: HpaTarget = None,
    advise: Advise = False,
    expert_load: ExpertLoad = LOADS,
    node_gpus: NodeGpus = NODE_GPUS,
    once_per_node: OncePerNode = False,
    lose_node: LoseNode = [],  # noqa: B006 - typer copies it
    node_back: NodeBack = NODE_BACK_S,
    json_to: o.JsonTo = "",
    html: o.Html = None,
    plot: o.Plot = None,
    records: o.Records = None,
) -> None:
    """Fleet simulator: replay a trace on a cluster of GPUs modelled from their data sheets.

    Router, placement, admission and block accounting are production code under virtual time. The durations
    of steps, transfers and loads are modelled (docs/simulation.md). For seeded faults, use `baton sim`.

    Example: baton simulate conversation.jsonl --model llama-3-70b --gpu h100 --tp 4 --prefill 8 --decode 8
    """
    _simulate_as_asked(dict(locals()))


def _simulate_as_asked(given: dict[str, Any]) -> None:
    outputs = Outputs(*(given.pop(name) for name in Outputs._fields))
    try:
        _run(_options(given), outputs)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None


def _options(given: dict[str, Any]) -> SimulateOptions:
    """Raises SetupError."""
    counts = {role: given[role] for role in ("prefill", "decode", "aggregated")}
    numbers, shape = pools_and_shape(counts, tensor=given["tp"], pipeline=given["pp"])
    fields: dict[str, Any] = {**given, **numbers, "tp": shape.tensor, "pp": shape.pipeline}
    return SimulateOptions(**fields)


def _run(asked: SimulateOptions, outputs: Outputs) -> None:
    outputs.check()
    ready = prepare(asked)
    console = Console(stderr=True)
    for planned in ready.experts.losses if ready.experts is not None else ():
        console.print(planned.words(), highlight=False, soft_wrap=True)
    if asked.search_rate:
        ready = _at_capacity(ready, console)
    done = _simulate(ready, console)
    publish(done, ready.settings, rule=asked.autoscale, to=outputs)


OPTION_OF = {
    "engine.block_tokens": "--block-tokens",
    "engine.step_tokens_max": "--step-tokens",
    "engine.batch_sequences_max": "--batch",
    "engine.tpot_slo_s": "--tpot-slo",
    "engine.shape": "--tp and --pp, or a shape such as --prefill 2xtp2",
}
"""Settings that simulations take from an option of theirs."""


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """A simulation that is ready to run."""

    asked: SimulateOptions
    plan: ReplayPlan
    spec: FleetSpec
    machine: Machine
    settings: RunSettings
    trace_block_tokens: float
    time_scale: Fraction
    """The plan's time scale."""
    factor: float = 1.0
    """Request rate, as a multiple of the plan's."""
    scale: Callable[[Fleet], FleetScaling] | None = None
    experts: ExpertCluster | None = None

    @property
    def planned(self) -> int:
        return len(self.plan.requests) * self.asked.copies

    def at(self, factor: float) -> "PreparedSimulation":
        time_scale = factor_text(self.time_scale / Fraction(factor).limit_denominator(10**9))
        return replace(self, factor=factor, settings=replace(self.settings, time_scale=time_scale))


def prepare(asked: SimulateOptions) -> PreparedSimulation:
    """Raises SetupError for a simulation that cannot run."""
    objectives = asked.objectives()
    _check(asked, objectives)
    trace = _trace(asked)
    scaling = asked.scaling(trace)
    plan = make_plan(trace, scaling, spread=asked.spread, seed=asked.seed)
    classes = {request.slo_class for request in plan.requests}
    objectives.check_classes(classes)
    if asked.search_rate and plan.requests[-1].at_s <= plan.requests[0].at_s:
        raise SetupError("--search needs requests at different times: take more of the trace")
    block_tokens = asked.block_tokens or block_tokens_of(plan)
    config = _config(asked, block_tokens)
    pools = asked.pools
    experts, machines = _machines(asked, config)
    machine = next(machines[role] for role in Role if role in machines)
    spec = fleet_spec(
        machines,
        pools,
        block_tokens=block_tokens,
        router=config.router,
        engine=config.engine,
        slo_classes=_targets(objectives, classes),
        heartbeat_s=asked.heartbeat,
        hop_s=asked.hop,
        cells=asked.cells,
        store=StoreSpec(
            asked.store_gb * 1e9,
            asked.ssd_gb * 1e9,
            host_bytes_s=machine.host_bytes_s,
            peer_bytes_s=machine.link_bytes_s,
        ),
        refuses_late=config.slo.late == "refuse",
        seed=asked.seed,
    )
    settings = _settings(asked, trace, plan, spec, machine, pools, objectives, scaling)
    if experts is not None:
        settings = replace(settings, options={**settings.options, **experts.options()})
    scale = _scaled(asked, spec, config.autoscale) if asked.autoscale else None
    return PreparedSimulation(
        *(asked, plan, spec, machine, settings, float(plan.block_tokens), scaling.time_scale),
        scale=scale,
        experts=experts,
    )


def _check(asked: SimulateOptions, objectives: ClassObjectives) -> None:
    """Check the options that do not depend on the trace. Raises SetupError."""
    if asked.search_rate:
        objectives.check_search()
    check_options(
        asked.autoscale, start_up_s=asked.start_up, hpa_target=asked.hpa_target, is_advice=asked.advise
    )


def _targets(objectives: ClassObjectives, classes: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The SLO targets of a fleet. A class without its own targets has the default; 0 means no target."""
    slos = {name: objectives.by_class.get(name, objectives.default) for name in ("", *classes)}
    return {name: (slo.ttft_s or 0.0, slo.tpot_s or 0.0) for name, slo in slos.items()}


def _scaled(
    asked: SimulateOptions, spec: FleetSpec, config: AutoscaleConfig
) -> Callable[[Fleet], FleetScaling]:
    if asked.search_rate:
        raise SetupError("--search works with a fixed cluster: leave --autoscale out")
    return scaled(
        asked.autoscale,
        spec,
        config,
        start_up_s=asked.start_up,
        hpa_target=asked.hpa_target,
        is_advice=asked.advise,
        gpus_per_worker=asked.tp * asked.pp,
    )


def _trace(asked: SimulateOptions) -> Trace:
    seconds = asked.start + asked.duration
    requests = asked.limit if asked.start == 0.0 and asked.duration == inf else None
    whole = open_trace(asked.trace, requests=requests, duration_s=seconds, seed=asked.seed)
    return cut(whole, start_s=asked.start, duration_s=asked.duration, limit=asked.limit)


def _own_rate(plan: ReplayPlan) -> float:
    return (len(plan.requests) - 1) / max(1e-9, plan.requests[-1].at_s - plan.requests[0].at_s)


def _machines(asked: SimulateOptions, config: Config) -> tuple[ExpertCluster | None, Mapping[Role, Machine]]:
    """The workers of each role, and the pools of experts where these are divided."""
    check_expert_options(asked.experts, config)
    if config.experts.parallel == "off":
        return None, dict.fromkeys(Role, _machine(asked))
    if asked.tp * asked.pp > 1 or asked.costs is not None or asked.autoscale:
        raise SetupError(
            "experts.parallel needs workers of one GPU (--tp 1), without --costs and --autoscale"
        )
    if asked.search_rate and asked.lose_node:
        raise SetupError("--search works with a cluster that loses nothing: leave --lose-node out")
    spec = ExpertClusterSpec(
        *(asked.model, asked.gpu, asked.weight_bytes, asked.pools, asked.expert_load),
        node_gpus=asked.node_gpus,
        once_per_node=asked.once_per_node,
        lose_node=asked.lose_node,
        node_back_s=asked.node_back,
    )
    experts = ExpertCluster(spec, config)
    machines = experts.machines(kv_bytes=asked.kv_gb * 1e9 if asked.kv_gb else None)
    if asked.link_gb_s:
        machines = {role: one.with_link(asked.link_gb_s * 1e9) for role, one in machines.items()}
    return experts, machines


def _machine(asked: SimulateOptions) -> Machine:
    node = Node(
        find_model(asked.model),
        find_gpu(asked.gpu),
        tensor=asked.tp,
        pipeline=asked.pp,
        weight_bytes=asked.weight_bytes,
    )
    machine = machine_of(node, kv_bytes=asked.kv_gb * 1e9 if asked.kv_gb else None)
    if asked.costs is not None:
        shape = Shape(tensor=asked.tp, pipeline=asked.pp)
        name = f"{node.model.name}, {asked.costs.name}"
        machine = with_costs(machine, read_costs(asked.costs), shape, name)
    if asked.link_gb_s:
        machine = machine.with_link(asked.link_gb_s * 1e9)
    return machine


def _config(asked: SimulateOptions, block_tokens: int) -> Config:
    """The configuration of routers and engines: flags, then --set, then the environment.

    Raises SetupError.
    """
    for text in asked.sets:
        if option := OPTION_OF.get(text.partition("=")[0].strip()):
            raise SetupError(f"--set {text}: here it is an option, {option}")
    engine = {"block_tokens": block_tokens, "step_tokens_max": asked.step_tokens}
    flags: dict[str, object] = {f"engine.{name}": value for name, value in engine.items()}
    flags["engine.batch_sequences_max"] = asked.batch
    flags["router.policy"] = asked.policy or None
    if asked.tpot_slo != NO_TARGET_S:
        flags["engine.tpot_slo_s"] = asked.tpot_slo
    return load_config(asked.sets, flags)


def _settings(
    asked: SimulateOptions,
    trace: Trace,
    plan: ReplayPlan,
    spec: FleetSpec,
    machine: Machine,
    pools: PoolSizes,
    objectives: ClassObjectives,
    scaling: TraceScaling,
) -> RunSettings:
    return RunSettings(
        trace=name_of(asked.trace),
        target=f"{pools} × {machine.name}",
        model=asked.model,
        slo=objectives.default,
        class_slos=dict(objectives.by_class),
        attain=asked.attain,
        planned=len(plan.requests) * asked.copies,
        kind="simulation",
        trace_format="" if asked.trace.startswith(SYNTH) else trace.format.value,
        time_scale=factor_text(scaling.time_scale),
        seed=asked.seed,
        options={
            "policy": spec.router.policy,
            "disaggregate": spec.router.disaggregate,
            "length_scale": asked.length_scale,
            "output_scale": asked.output_scale or asked.length_scale,
            "rate": asked.rate,
            "copies": asked.copies,
            "block_tokens": spec.workers[0][0].block_tokens,
            "kv_blocks": spec.workers[0][0].block_count,
            "step_tokens": asked.step_tokens,
            "store_gb": asked.store_gb,
            "ssd_gb": asked.ssd_gb,
            "cells": asked.cells,
        },
    )


def _at_capacity(ready: PreparedSimulation, console: Console) -> PreparedSimulation:
    """The simulation at the highest rate that attains the goal."""
    attain, asked = ready.asked.attain, ready.asked
    own_rate = asked.copies * _own_rate(ready.plan)

    def share_at(factor: float) -> float:
        return attains(
            ready.spec,
            faster(of_plan(ready.plan, copies=asked.copies, seed=asked.seed), factor),
            trace_block_tokens=ready.trace_block_tokens,
            attain=attain,
            planned=ready.planned,
        )

    found = search(
        share_at,
        attain=attain,
        progress=lambda factor, share: console.print(
            f"{factor * own_rate:8.3f} requests/s: {share:.1%} meet both targets"
            + ("" if share >= attain else " (stopped)")
        ),
    )
    if not found.factor:
        raise SetupError(
            "no rate attains the goal: even an idle cluster misses the targets; relax them or add workers"
        )
    console.print(f"highest rate: {found.factor * own_rate:.3f} requests/s")
    return ready.at(found.factor)


def _simulate(ready: PreparedSimulation, console: Console) -> Simulated:
    asked = ready.asked
    demands = of_plan(ready.plan, copies=asked.copies, seed=asked.seed)
    with live_progress(console, planned=ready.planned) as observer:
        return run(
            ready.spec,
            faster(demands, ready.factor) if ready.factor != 1.0 else demands,
            ready.settings,
            trace_block_tokens=ready.trace_block_tokens,
            observer=observer,
            scale=ready.scale,
            begin=None if ready.experts is None else ready.experts.lose_nodes,
        )
