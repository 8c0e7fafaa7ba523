"""The options of `baton simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.core.policies import PLACEMENT_POLICIES
from commands.simulate_experts import ExpertOptions
from commands.simulate_pools import TENSOR_RANKS
from loadgen.lengths import TraceScaling, check_rate, parse_factor, time_scale_for
from loadgen.options import target
from loadgen.slo import ClassObjectives, parse_class_slo, slo_of
from loadgen.traces import Trace
from simulator.fleet.setup import PoolSizes

TraceName = Annotated[str, typer.Argument(help="Trace file as for `baton replay`, or synth:NAME.")]
Model = Annotated[str, typer.Option(help="Known model, such as llama-3-70b, or a folder with config.json.")]
Gpu = Annotated[str, typer.Option(help="GPU whose data sheet is used: h100, a100, l40s, mi300x …")]
Tp = Annotated[
    int | None,
    typer.Option(min=1, show_default=str(TENSOR_RANKS), help="GPUs per worker (tensor parallel)."),
]
Pp = Annotated[
    int | None, typer.Option(min=1, show_default="1", help="Stages per worker (pipeline parallel).")
]
WeightBytes = Annotated[
    float, typer.Option(min=0.25, max=4, help="Bytes per weight: 2 for bf16, 1 for fp8 or int8.")
]
Prefill = Annotated[
    str,
    typer.Option(metavar="N[xSHAPE]", help="Prefill workers: 2, or 2xtp4pp2 for two of this shape."),
]
Decode = Annotated[
    str, typer.Option(metavar="N[xSHAPE]", help="Decode workers, of the same shape as prefill workers.")
]
Aggregated = Annotated[str, typer.Option(metavar="N[xSHAPE]", help="Workers that run both phases.")]
Policy = Annotated[
    str,
    typer.Option(help=f"Placement policy ({', '.join(PLACEMENT_POLICIES)}); default: router.policy."),
]
Ttft = Annotated[
    float, typer.Option(parser=target, metavar="SECONDS", help="TTFT target in seconds; none: no target.")
]
Tpot = Annotated[
    float,
    typer.Option(parser=target, metavar="SECONDS", help="TPOT target in seconds; none: no target."),
]
Classes = Annotated[
    list[str],
    typer.Option("--class-slo", metavar="NAME=TTFT/TPOT", help="Targets of a service class; repeatable."),
]
Rate = Annotated[float | None, typer.Option(help="Mean requests per second, instead of --time-scale.")]
TimeScale = Annotated[str, typer.Option(help="Factor for the time between arrivals; 2 is half the rate.")]
LengthScale = Annotated[str, typer.Option(help="Factor for input lengths, such as 1/16.")]
OutputScale = Annotated[str, typer.Option(help="Factor for output lengths; default: --length-scale.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Take at most this many requests of the trace.")]
Start = Annotated[float, typer.Option(min=0, help="Skip this many seconds of the trace.")]
Duration = Annotated[float, typer.Option(min=0, help="Take this many seconds of the trace.")]
Copies = Annotated[
    int,
    typer.Option(
        min=1, help="Copies of the trace that run at once, shifted in time and without shared prefixes."
    ),
]
Spread = Annotated[bool, typer.Option(help="Spread arrivals inside a trace's ticks (Mooncake: 3 s).")]
BlockTokens = Annotated[
    int, typer.Option(min=0, help="Tokens per KV block; 0: the trace's block size, or 64.")
]
StepTokens = Annotated[int, typer.Option(min=1, help="Token budget of one step.")]
Batch = Annotated[int, typer.Option(min=1, help="Maximum sequences in one step.")]
KvSize = Annotated[
    float, typer.Option(min=0, help="GB of KV pool per worker; 0: the memory that weights leave free.")
]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="JSON of measured costs: of `baton bench engine`, for a worker as it is, or of `baton bench "
        "parallel`, for one rank, which --tp and --pp divide."
    ),
]
Link = Annotated[float, typer.Option(min=0, help="GB/s between two workers; 0: the GPUs' network cards.")]
StoreSize = Annotated[
    float, typer.Option(min=0, help="GB of host memory per host for the KV store; 0: none.")
]
SsdSize = Annotated[float, typer.Option(min=0, help="GB of SSD per host for the KV store.")]
Heartbeat = Annotated[float, typer.Option(min=0.001, help="Seconds between two reports of a worker.")]
Hop = Annotated[float, typer.Option(min=0, help="Seconds that a message between two processes takes.")]
Cells = Annotated[int, typer.Option(min=1, help="Number of cells; each has its own workers and router.")]
Seed = Annotated[int, typer.Option(help="Seed of the arrivals and random choices.")]
Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any router or engine setting; repeatable."),
]
JsonTo = Annotated[str, typer.Option("--json", help="Write the figures to this file; - is standard output.")]
Plot = Annotated[
    Path | None, typer.Option(help="Write a plot of the pools' load over time to this SVG file.")
]
Html = Annotated[Path | None, typer.Option(help="Write the report to this file, as one self-contained page.")]
Records = Annotated[
    Path | None,
    typer.Option(help="Write one line per request to this file (.gz: compressed), for `baton compare`."),
]
SEARCH = "Find the highest rate at which --attain of the requests meet both targets."
Attain = Annotated[
    float, typer.Option(min=0.01, max=1, help="Share of requests that must meet both targets for --search.")
]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The parameters of `baton simulate`, by the same names."""

    trace: str
    model: str
    gpu: str
    tp: int
    pp: int
    weight_bytes: float
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
    expert_load: str
    node_gpus: int
    once_per_node: bool
    lose_node: list[str]
    node_back: float

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions(*(getattr(self, name) for name in ExpertOptions._fields))

    @property
    def pools(self) -> PoolSizes:
        return PoolSizes(self.prefill, self.decode, self.aggregated)

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
