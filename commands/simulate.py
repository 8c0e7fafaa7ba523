"""`baton simulate` replays a production trace on a modelled cluster, with the production router."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.config import AutoscaleConfig, Config
from baton.core.errors import SetupError
from baton.core.policies import PLACEMENT_POLICIES
from baton.core.shape import Shape
from commands.autoscale import Advise, AutoscaleRule, HpaTarget, StartUp, check_options, scaled
from commands.settings import load_config
from commands.simulate_pools import TENSOR_RANKS, pools_and_shape
from commands.simulate_show import Outputs, live_progress, publish
from loadgen.lengths import (
    ReplayPlan,
    TraceScaling,
    check_rate,
    factor_text,
    make_plan,
    parse_factor,
    time_scale_for,
)
from loadgen.options import target
from loadgen.report import RunSettings
from loadgen.slo import NO_TARGET_S, ClassObjectives, parse_class_slo, slo_of
from loadgen.sources import SYNTH, name_of, open_trace
from loadgen.traces import Trace, cut
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
from simulator.hardware import Node, find_gpu, find_model

_Trace = Annotated[str, typer.Argument(help="Trace file as for `baton replay`, or synth:NAME.")]
_Model = Annotated[str, typer.Option(help="Known model, such as llama-3-70b, or a folder with config.json.")]
_Gpu = Annotated[str, typer.Option(help="GPU whose data sheet is used: h100, a100, l40s, mi300x …")]
_Tp = Annotated[
    int | None,
    typer.Option(min=1, show_default=str(TENSOR_RANKS), help="GPUs per worker (tensor parallel)."),
]
_Pp = Annotated[
    int | None, typer.Option(min=1, show_default="1", help="Stages per worker (pipeline parallel).")
]
_Prefill = Annotated[
    str,
    typer.Option(metavar="N[xSHAPE]", help="Prefill workers: 2, or 2xtp4pp2 for two of this shape."),
]
_Decode = Annotated[
    str, typer.Option(metavar="N[xSHAPE]", help="Decode workers, of the same shape as prefill workers.")
]
_Aggregated = Annotated[str, typer.Option(metavar="N[xSHAPE]", help="Workers that run both phases.")]
_Policy = Annotated[
    str,
    typer.Option(help=f"Placement policy ({', '.join(PLACEMENT_POLICIES)}); default: router.policy."),
]
_Ttft = Annotated[
    float, typer.Option(parser=target, metavar="SECONDS", help="TTFT target in seconds; none: no target.")
]
_Tpot = Annotated[
    float,
    typer.Option(parser=target, metavar="SECONDS", help="TPOT target in seconds; none: no target."),
]
_Classes = Annotated[
    list[str],
    typer.Option("--class-slo", metavar="NAME=TTFT/TPOT", help="Targets of a service class; repeatable."),
]
_Rate = Annotated[float | None, typer.Option(help="Mean requests per second, instead of --time-scale.")]
_TimeScale = Annotated[str, typer.Option(help="Factor for the time between arrivals; 2 is half the rate.")]
_LengthScale = Annotated[str, typer.Option(help="Factor for input lengths, such as 1/16.")]
_OutputScale = Annotated[str, typer.Option(help="Factor for output lengths; default: --length-scale.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="Take at most this many requests of the trace.")]
_Start = Annotated[float, typer.Option(min=0, help="Skip this many seconds of the trace.")]
_Duration = Annotated[float, typer.Option(min=0, help="Take this many seconds of the trace.")]
_Copies = Annotated[
    int,
    typer.Option(
        min=1, help="Copies of the trace that run at once, shifted in time and without shared prefixes."
    ),
]
_Spread = Annotated[bool, typer.Option(help="Spread arrivals inside a trace's ticks (Mooncake: 3 s).")]
_BlockTokens = Annotated[
    int, typer.Option(min=0, help="Tokens per KV block; 0: the trace's block size, or 64.")
]
_StepTokens = Annotated[int, typer.Option(min=1, help="Token budget of one step.")]
_Batch = Annotated[int, typer.Option(min=1, help="Maximum sequences in one step.")]
_Kv = Annotated[
    float, typer.Option(min=0, help="GB of KV pool per worker; 0: the memory that weights leave free.")
]
_Costs = Annotated[
    Path | None,
    typer.Option(
        help="JSON of measured costs: of `baton bench engine`, for a worker as it is, or of `baton bench "
        "parallel`, for one rank, which --tp and --pp divide."
    ),
]
_Link = Annotated[float, typer.Option(min=0, help="GB/s between two workers; 0: the GPUs' network cards.")]
_Store = Annotated[float, typer.Option(min=0, help="GB of host memory per host for the KV store; 0: none.")]
_Ssd = Annotated[float, typer.Option(min=0, help="GB of SSD per host for the KV store.")]
_Heartbeat = Annotated[float, typer.Option(min=0.001, help="Seconds between two reports of a worker.")]
_Hop = Annotated[float, typer.Option(min=0, help="Seconds that a message between two processes takes.")]
_Cells = Annotated[int, typer.Option(min=1, help="Number of cells; each has its own workers and router.")]
_Seed = Annotated[int, typer.Option(help="Seed of the arrivals and random choices.")]
_Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any router or engine setting; repeatable."),
]
_Json = Annotated[str, typer.Option("--json", help="Write the figures to this file; - is standard output.")]
_Plot = Annotated[
    Path | None, typer.Option(help="Write a plot of the pools' load over time to this SVG file.")
]
_Html = Annotated[
    Path | None, typer.Option(help="Write the report to this file, as one self-contained page.")
]
_Records = Annotated[
    Path | None,
    typer.Option(help="Write one line per request to this file (.gz: compressed), for `baton compare`."),
]
_SEARCH = "Find the highest rate at which --attain of the requests meet both targets."
_Attain = Annotated[
    float, typer.Option(min=0.01, max=1, help="Share of requests that must meet both targets for --search.")
]


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of `simulate`, by the same names."""

    trace: str
    model: str
    gpu: str
    tp: int
    pp: int
    prefill: int
    decode: int
    aggregated: int
    policy: str
    ttft_slo: float
    tpot_slo: float
    class_slos: list[str]
    rate: float | None
    time_scale: str
    length_scale: str
    output_scale: str
    limit: int | None
    start: float
    duration: float
    copies: int
    spread: bool
    block_tokens: int
    step_tokens: int
    batch: int
    kv_gb: float
    costs: Path | None
    link_gb_s: float
    store_gb: float
    ssd_gb: float
    heartbeat: float
    hop: float
    cells: int
    seed: int
    sets: list[str]
    search_rate: bool
    attain: float
    autoscale: str
    start_up: float | None
    hpa_target: float | None
    advise: bool

    def objectives(self) -> ClassObjectives:
        """Raises SetupError."""
        by_class = dict(parse_class_slo(text) for text in self.class_slos)
        return ClassObjectives(slo_of(self.ttft_slo, self.tpot_slo), by_class)

    def scaling(self, trace: Trace) -> TraceScaling:
        """Raises SetupError."""
        check_rate(self.rate, self.time_scale)
        return TraceScaling(
            parse_factor(self.length_scale),
            parse_factor(self.output_scale or self.length_scale),
            parse_factor(self.time_scale)
            if self.rate is None
            else time_scale_for(trace, self.rate / self.copies),
        )


def simulate(
    trace: _Trace,
    model: _Model = "llama-3-70b",
    gpu: _Gpu = "h100",
    tp: _Tp = None,
    pp: _Pp = None,
    prefill: _Prefill = "0",
    decode: _Decode = "0",
    aggregated: _Aggregated = "0",
    policy: _Policy = "",
    ttft_slo: _Ttft = 10.0,
    tpot_slo: _Tpot = 0.1,
    class_slos: _Classes = [],  # noqa: B006 - typer copies it
    rate: _Rate = None,
    time_scale: _TimeScale = "1",
    length_scale: _LengthScale = "1",
    output_scale: _OutputScale = "",
    limit: _Limit = None,
    start: _Start = 0.0,
    duration: _Duration = inf,
    copies: _Copies = 1,
    spread: _Spread = True,
    block_tokens: _BlockTokens = 0,
    step_tokens: _StepTokens = STEP_TOKENS,
    batch: _Batch = BATCH_SEQUENCES,
    kv_gb: _Kv = 0.0,
    costs: _Costs = None,
    link_gb_s: _Link = 0.0,
    store_gb: _Store = 0.0,
    ssd_gb: _Ssd = 0.0,
    heartbeat: _Heartbeat = 0.25,
    hop: _Hop = 0.0002,
    cells: _Cells = 1,
    seed: _Seed = 0,
    sets: _Sets = [],  # noqa: B006 - typer copies it
    search_rate: Annotated[bool, typer.Option("--search", help=_SEARCH)] = False,
    attain: _Attain = 0.9,
    autoscale: AutoscaleRule = "",
    start_up: StartUp = None,
    hpa_target: HpaTarget = None,
    advise: Advise = False,
    json_to: _Json = "",
    html: _Html = None,
    plot: _Plot = None,
    records: _Records = None,
) -> None:
    """Fleet simulator: replay a trace on a cluster of GPUs modelled from their data sheets.

    Router, placement, admission and block accounting are production code under virtual time. The durations
    of steps, transfers and loads are modelled (docs/simulation.md). For seeded faults, use `baton sim`.

    Example: baton simulate conversation.jsonl --model llama-3-70b --gpu h100 --tp 4 --prefill 8 --decode 8
    """
    given: dict[str, Any] = dict(locals())
    outputs = Outputs(*(given.pop(name) for name in Outputs._fields))
    try:
        _run(_options(given), outputs)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None


def _options(given: dict[str, Any]) -> Options:
    """Raises SetupError."""
    counts = {role: given[role] for role in ("prefill", "decode", "aggregated")}
    numbers, shape = pools_and_shape(counts, tensor=given["tp"], pipeline=given["pp"])
    fields: dict[str, Any] = {**given, **numbers, "tp": shape.tensor, "pp": shape.pipeline}
    return Options(**fields)


def _run(asked: Options, outputs: Outputs) -> None:
    outputs.check()
    ready = prepare(asked)
    console = Console(stderr=True)
    if asked.search_rate:
        ready = _at_capacity(ready, console)
    done = _simulate(ready, console)
    publish(done, ready.settings, rule=asked.autoscale, to=outputs)


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """A simulation that is ready to run."""

    asked: Options
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

    @property
    def planned(self) -> int:
        return len(self.plan.requests) * self.asked.copies

    def at(self, factor: float) -> "PreparedSimulation":
        time_scale = factor_text(self.time_scale / Fraction(factor).limit_denominator(10**9))
        return replace(self, factor=factor, settings=replace(self.settings, time_scale=time_scale))


def prepare(asked: Options) -> PreparedSimulation:
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
    machine = _machine(asked)
    config = _config(asked, block_tokens)
    pools = PoolSizes(asked.prefill, asked.decode, asked.aggregated)
    spec = fleet_spec(
        machine,
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
    scale = _scaled(asked, spec, config.autoscale) if asked.autoscale else None
    return PreparedSimulation(
        asked, plan, spec, machine, settings, float(plan.block_tokens), scaling.time_scale, scale=scale
    )


def _check(asked: Options, objectives: ClassObjectives) -> None:
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


def _scaled(asked: Options, spec: FleetSpec, config: AutoscaleConfig) -> Callable[[Fleet], FleetScaling]:
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


def _trace(asked: Options) -> Trace:
    seconds = asked.start + asked.duration
    requests = asked.limit if asked.start == 0.0 and asked.duration == inf else None
    whole = open_trace(asked.trace, requests=requests, duration_s=seconds, seed=asked.seed)
    return cut(whole, start_s=asked.start, duration_s=asked.duration, limit=asked.limit)


def _own_rate(plan: ReplayPlan) -> float:
    return (len(plan.requests) - 1) / max(1e-9, plan.requests[-1].at_s - plan.requests[0].at_s)


def _machine(asked: Options) -> Machine:
    node = Node(find_model(asked.model), find_gpu(asked.gpu), tensor=asked.tp, pipeline=asked.pp)
    machine = machine_of(node, kv_bytes=asked.kv_gb * 1e9 if asked.kv_gb else None)
    if asked.costs is not None:
        shape = Shape(tensor=asked.tp, pipeline=asked.pp)
        name = f"{node.model.name}, {asked.costs.name}"
        machine = with_costs(machine, read_costs(asked.costs), shape, name)
    if asked.link_gb_s:
        machine = machine.with_link(asked.link_gb_s * 1e9)
    return machine


def _config(asked: Options, block_tokens: int) -> Config:
    """The configuration of routers and engines: flags, then --set, then the environment."""
    engine = {"block_tokens": block_tokens, "step_tokens_max": asked.step_tokens}
    flags: dict[str, object] = {f"engine.{name}": value for name, value in engine.items()}
    flags["engine.batch_sequences_max"] = asked.batch
    flags["router.policy"] = asked.policy or None
    if asked.tpot_slo != NO_TARGET_S:
        flags["engine.tpot_slo_s"] = asked.tpot_slo
    return load_config(asked.sets, flags)


def _settings(
    asked: Options,
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
        )
