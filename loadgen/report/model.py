"""The report's types: its JSON is these fields by these names, under `schema`.

New fields with defaults do not change the schema's number; a field that goes or changes its meaning does.
"""

from dataclasses import dataclass, field
from typing import Literal

import orjson

from loadgen.slo import Objectives, Slo

SCHEMA = "baton-report/1"
QUANTILE_LEVELS = (
    *(i / 200 for i in range(198)),
    *(0.99 + i / 1000 for i in range(10)),
    1.0,
)
"""Of `Distributions`: every half percent, every tenth of a percent in the tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for, as the report repeats it."""

    trace: str
    target: str
    """URL of the server, or what was simulated."""
    model: str
    slo: Slo = field(default_factory=Slo)
    class_slos: dict[str, Slo] = field(default_factory=dict[str, Slo])
    """Of classes whose targets differ from `slo`."""
    attain: float = 0.9
    """Share of requests that should meet their targets: what search and SLO scale aim at."""
    planned: int = 0
    """Requests of the plan; fewer were offered if the run was stopped."""
    label: str = ""
    """Name of the run where several are compared."""
    kind: str = "replay"
    trace_format: str = ""
    time_scale: str = "1"
    seed: int = 0
    expected_hit_ratio: float | None = None
    """Share of prompt tokens that an LRU prefix cache of the size given would hold. None: the server's tokens
    are not ours, so nothing can be expected."""
    options: dict[str, str | int | float | bool | None] = field(
        default_factory=dict[str, str | int | float | bool | None]
    )
    """The command's own particulars, shown as they are."""

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.slo, self.class_slos)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a sample, seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Share:
    """`met` of `judged`, with a 95 % interval that allows for neighbours being alike."""

    met: int
    judged: int
    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of all requests, or of those of one class or tenant.

    offered = completed + refused + failed + cancelled. Latencies are of completed requests, from the planned
    instant. Shares are of judged = offered - cancelled: one that the client gave up as planned says nothing.
    """

    offered: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    goodput_share: float
    """Requests that met both targets, of those judged: a refused or failed one missed them."""
    goodput_per_s: float
    """Over the time of the arrivals, as `offered_per_s`: never more than that."""
    goodput: Share
    ttft_attained: Share
    tpot_attained: Share
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    """Between two events with text; a server that sends several tokens in one event shows fewer."""
    e2e: Percentiles | None
    requests_per_s: float
    """Completed, over the time until the last end, or that of the arrivals if it is longer; tokens, too."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cache_hit_ratio: float | None
    """Cached by all prompt tokens, over requests where the server says; None: it never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Figures):
    """Requests of one class or one tenant."""

    name: str
    """Empty: those that name none."""
    slo: Slo | None
    """None: of several classes, with targets that differ."""


@dataclass(frozen=True, slots=True)
class Distributions:
    """Seconds at each of `levels`, of completed requests; empty where there is none."""

    levels: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()
    itl: tuple[float, ...] = ()
    e2e: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """Requests whose planned instant lies in one stretch of time."""

    start_s: float
    """Since the first planned instant."""
    offered: int
    met: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    ttft_p50: float | None
    ttft_p99: float | None


@dataclass(frozen=True, slots=True)
class Band:
    """Mean seconds of each stage over requests whose TTFT is about one percentile."""

    name: str
    count: int
    ttft_s: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class LatencyBreakdown:
    """Where the time to the first and second token went, of completed requests whose server tells."""

    count: int
    stages: dict[str, Percentiles]
    """In the order in which they happen. `client` is our own lateness, `rest` what nobody accounts for:
    network, the server's and our own reading; both are part of TTFT."""
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What one worker did for completed requests. On one worker for both phases, both are counted."""

    name: str
    prefill_requests: int
    prompt_tokens: int
    """Cached ones included."""
    computed_tokens: int
    """Prompt tokens that were not cached, as far as the server says."""
    decode_requests: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PoolBalance:
    """Over the workers that served something; one that served nothing is not known here."""

    workers: tuple[WorkerShare, ...]
    prompt_tokens_max_to_mean: float | None
    """Most loaded by mean, over workers that prefilled: 1 is even. None: no such worker."""
    output_tokens_max_to_mean: float | None


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Predicted beside measured."""

    count: int
    mape: float
    """Mean of |predicted - measured| / measured."""
    bias: float
    """Mean of predicted - measured, by mean measured: above 0 is pessimistic."""
    ape_p50: float
    ape_p90: float


@dataclass(frozen=True, slots=True)
class Predictions:
    """The server's, of completed requests. TTFT is compared with that from when we sent, not from when we
    should have. `*_settled` leaves out the first 100 requests."""

    ttft: PredictionError | None
    tpot: PredictionError | None
    ttft_settled: PredictionError | None
    tpot_settled: PredictionError | None


@dataclass(frozen=True, slots=True)
class Generator:
    """Whether the load generator kept up."""

    lateness: Percentiles | None
    """Of our own sending; latencies include it."""
    late_share: float
    """Requests sent more than 10 ms late."""
    connection_limited: int
    """Requests not sent for want of a connection."""
    warning: str
    """What is to be done about it; empty: it kept up."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    scale: float
    share: float
    """Of judged requests that meet both targets times `scale`."""
    rate_per_s: float | None = None
    """Highest rate that attains the goal at this scale; None: not searched, or none does."""


@dataclass(frozen=True, slots=True)
class SloScales:
    """DistServe figures 8 and 9: attainment at one rate, as both targets are scaled."""

    points: tuple[ScalePoint, ...]
    most_stringent: float | None
    """The least scale at which `attain` of the requests meet both; None: no scale does."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of a search."""

    rate_per_s: float
    met: int
    judged: int
    share: float
    low: float
    high: float
    aborted: bool
    """Stopped because the goal was out of reach; its share is of the requests until then."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The highest rate at which `attain` of the requests meet both targets."""

    attain: float
    rate_per_s: float | None
    """None: not even the lowest rate tried attains it."""
    fails_at_per_s: float | None
    """The lowest rate above it that does not; None: the highest rate allowed still does."""
    reason: str
    probes: tuple[Probe, ...]
    """In the order in which they ran."""


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Completed requests whose answers an earlier run of the same requests has, too."""

    compared: int
    differing: int
    first_differing: tuple[int, ...] = ()
    """Places in the plan, from 0."""


@dataclass(frozen=True, slots=True)
class ShortAnswers:
    """Completed requests whose answer ended before it had as many tokens as were asked for: a server that
    stops early does less work than the trace says."""

    shorter: int
    told: int
    """Where the server counts the answer's tokens."""
    mean_share: float | None
    """Of what was asked for, over those that are shorter; None: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Figures):
    """Of one run."""

    settings: Settings
    duration_s: float
    """From the first planned instant to the last end."""
    offered_per_s: float
    """Over the time of the arrivals."""
    interrupted: bool
    """Fewer were offered than planned."""
    errors: dict[str, int]
    """By kind, refusals included."""
    refusals: dict[str, int]
    """By what the server said, numbers left out."""
    lateness: Percentiles | None
    generator: Generator
    classes: tuple[Group, ...]
    tenants: tuple[Group, ...]
    window_s: float
    windows: tuple[Window, ...]
    distributions: Distributions
    latency_breakdown: LatencyBreakdown | None
    balance: PoolBalance | None
    predictions: Predictions | None
    slo_scales: SloScales
    search: SearchResult | None = None
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Failed requests by kind and what was said, numbers left out."""
    began_at_s: float | None = None
    """Unix time of the first planned instant, to find it in logs and dashboards; None: of no real time."""
    answers: AnswerCheck | None = None
    """None: not compared with another run's."""
    arrivals_s: float = 0.0
    """In which requests came: from the first planned instant to the last, and a mean gap more."""
    short_answers: ShortAnswers | None = None
    """None: not known of any answer."""
    schema: Literal["baton-report/1"] = SCHEMA

    @property
    def judged(self) -> int:
        return self.goodput.judged

    @property
    def met(self) -> int:
        return self.goodput.met

    @property
    def label(self) -> str:
        return self.settings.label or f"{self.settings.model} at {self.settings.target}"

    def as_json(self) -> dict[str, object]:
        """Plain values, `schema` first."""
        values: dict[str, object] = orjson.loads(orjson.dumps(self, option=orjson.OPT_SERIALIZE_NUMPY))
        return {"schema": values.pop("schema"), **values}
