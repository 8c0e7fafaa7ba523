"""The types of a report. Its JSON has these fields by these names, under `schema`.

A new field with a default does not change the schema's number. A field that is removed or changes its meaning
does.
"""

from dataclasses import dataclass, field
from typing import Literal

import orjson

from loadgen.slo import ClassObjectives, Slo

SCHEMA = "baton-report/2"
QUANTILE_LEVELS = (
    *(i / 200 for i in range(198)),
    *(0.99 + i / 1000 for i in range(10)),
    1.0,
)
"""Levels of `Distributions`: every half percent, and every tenth of a percent in the tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, as the report repeats them."""

    trace: str
    target: str
    """URL of the server, or the name of the simulated cluster."""
    model: str
    slo: Slo = field(default_factory=Slo)
    class_slos: dict[str, Slo] = field(default_factory=dict[str, Slo])
    """Targets of classes that differ from `slo`."""
    attain: float = 0.9
    """Share of requests that should meet their targets; search and SLO scale aim at it."""
    planned: int = 0
    """Requests of the plan. Fewer were offered if the run was stopped."""
    label: str = ""
    """Name of the run in comparisons."""
    kind: str = "replay"
    trace_format: str = ""
    time_scale: str = "1"
    seed: int = 0
    expected_hit_ratio: float | None = None
    """Share of prompt tokens that an LRU prefix cache of the given size would hold. None if the server's
    tokens differ from ours, so that nothing can be expected."""
    options: dict[str, str | int | float | bool | None] = field(
        default_factory=dict[str, str | int | float | bool | None]
    )
    """Options of the command, shown as they are."""

    @property
    def objectives(self) -> ClassObjectives:
        return ClassObjectives(self.slo, self.class_slos)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Share:
    """`met` of `judged`, with a 95 % interval that allows for correlated neighbours."""

    met: int
    judged: int
    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of all requests, or of those of one class or tenant.

    offered = completed + refused + failed + cancelled. Latencies are those of completed requests, from the
    planned instant. Shares refer to judged = offered - cancelled, because a request that the client cancelled
    as planned shows nothing.
    """

    offered: int
    completed: int
    refused: int
    failed: int
    cancelled: int
    goodput_share: float
    """Share of judged requests that met both targets. A refused or failed one missed them."""
    goodput_per_s: float
    """Goodput over the time of the arrivals, like `offered_per_s`, so never more than that."""
    goodput: Share
    ttft_attained: Share
    tpot_attained: Share
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    """Time between two events with text. A server that sends several tokens in one event has fewer of
    them."""
    e2e: Percentiles | None
    requests_per_s: float
    """Completed requests per second, over the time until the last end or of the arrivals, whichever is
    longer. The same holds for tokens."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cache_hit_ratio: float | None
    """Cached by all prompt tokens, over the requests where the server reports it; None if it never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportGroup(Figures):
    """The requests of one class or one tenant."""

    name: str
    """The name is empty for requests that name none."""
    slo: Slo | None
    """None if the requests are of several classes with different targets."""


@dataclass(frozen=True, slots=True)
class Distributions:
    """Seconds at each of `levels`, over completed requests; empty if there are none."""

    levels: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()
    itl: tuple[float, ...] = ()
    e2e: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """The requests whose planned instant lies in one stretch of time."""

    start_s: float
    """Seconds since the first planned instant."""
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
    """Mean seconds of each stage, over requests whose TTFT is near one percentile."""

    name: str
    count: int
    ttft_s: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class LatencyStages:
    """The stages of the time to the first and second token, over completed requests whose server reports
    it."""

    count: int
    stages: dict[str, Percentiles]
    """Stages in the order in which they happen. `client` is our own lateness. `rest` is unaccounted time: the
    network, and the server's and our own reading. Both are part of TTFT."""
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """The work of one worker for completed requests. A worker that ran both phases has both counted."""

    name: str
    prefill_requests: int
    prompt_tokens: int
    """Prompt tokens, cached ones included."""
    computed_tokens: int
    """Prompt tokens that were not cached, as far as the server reports it."""
    decode_requests: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PoolBalance:
    """The balance over the workers that served something. Others are not known here."""

    workers: tuple[WorkerWork, ...]
    prompt_tokens_max_to_mean: float | None
    """The most loaded worker by the mean, over workers that prefilled; 1 is even. None without such a
    worker."""
    output_tokens_max_to_mean: float | None


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Predictions compared with measurements."""

    count: int
    mape: float
    """Mean of |predicted - measured| / measured."""
    bias: float
    """Mean of predicted - measured, divided by the mean measured; above 0 is pessimistic."""
    ape_p50: float
    ape_p90: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether what the server said with some probability held as often, over one service class after the
    first 100 requests. Shares are None without such requests."""

    slo_class: str
    count: int
    ttft_p90_held: float | None
    """Share of requests whose TTFT was at most the one predicted with 90 %."""
    tpot_p90_held: float | None
    meets_said: float | None
    """Mean predicted probability that the server's objectives hold."""
    meets_held: float | None
    """Share of the same requests that met the objectives of this report."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The server's predictions for completed requests. TTFT is compared with the time since we sent the
    request, not since its planned instant. `*_settled` leaves out the first 100 requests."""

    ttft: PredictionError | None
    tpot: PredictionError | None
    ttft_settled: PredictionError | None
    tpot_settled: PredictionError | None
    calibration: tuple[Calibration, ...] = ()
    """One entry per service class, ordered by name."""


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """Figures that show whether the load generator kept up."""

    lateness: Percentiles | None
    """Lateness of our own sending; latencies include it."""
    late_share: float
    """Share of requests sent more than 10 ms late."""
    connection_limited: int
    """Requests not sent because no connection was free."""
    warning: str
    """Advice about what to do; empty if it kept up."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    scale: float
    share: float
    """Share of judged requests that meet both targets times `scale`."""
    rate_per_s: float | None = None
    """Highest rate that attains the goal at this scale; None if it was not searched or does not exist."""


@dataclass(frozen=True, slots=True)
class SloScales:
    """Attainment at one rate as both targets are scaled, as in DistServe's figures 8 and 9."""

    points: tuple[ScalePoint, ...]
    most_stringent: float | None
    """The least scale at which `attain` of the requests meet both targets; None if there is none."""


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
    """True if the run was stopped because the goal was out of reach. Its share covers the requests until
    then."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The highest rate at which `attain` of the requests meet both targets."""

    attain: float
    rate_per_s: float | None
    """None if not even the lowest rate tried attains it."""
    fails_at_per_s: float | None
    """The lowest rate above it that does not attain it; None if the highest allowed rate still does."""
    reason: str
    probes: tuple[Probe, ...]
    """Probes in the order in which they ran."""


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Completed requests whose answers can be compared with an earlier run of the same requests."""

    compared: int
    differing: int
    first_differing: tuple[int, ...] = ()
    """Places in the plan, from 0."""


@dataclass(frozen=True, slots=True)
class ShortAnswers:
    """Completed requests whose answer ended before it had the requested tokens. A server that stops early
    does less work than the trace requires."""

    shorter: int
    counted: int
    """Number of requests whose answer tokens the server counts."""
    mean_share: float | None
    """Mean share of the requested tokens, over answers that are shorter; None if none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Figures):
    """The report of one run."""

    settings: RunSettings
    duration_s: float
    """Seconds from the first planned instant to the last end."""
    offered_per_s: float
    """Offered requests per second, over the time of the arrivals."""
    interrupted: bool
    """True if fewer requests were offered than planned."""
    errors: dict[str, int]
    """Errors by kind, refusals included."""
    refusals: dict[str, int]
    """Refusals by the server's message, without numbers."""
    lateness: Percentiles | None
    generator: GeneratorHealth
    classes: tuple[ReportGroup, ...]
    tenants: tuple[ReportGroup, ...]
    window_s: float
    windows: tuple[ReportWindow, ...]
    distributions: Distributions
    latency_breakdown: LatencyStages | None
    balance: PoolBalance | None
    predictions: Predictions | None
    slo_scales: SloScales
    search: SearchResult | None = None
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Failed requests by kind and message, without numbers."""
    began_at_s: float | None = None
    """Unix time of the first planned instant, to find it in logs and dashboards; None for a simulation."""
    answers: AnswerCheck | None = None
    """None if the answers were not compared with another run's."""
    arrivals_s: float = 0.0
    """Time of the arrivals: from the first planned instant to the last, plus a mean gap."""
    short_answers: ShortAnswers | None = None
    """None if it is not known of any answer."""
    schema: Literal["baton-report/2"] = SCHEMA

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
