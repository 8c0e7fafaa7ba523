"""Measures goodput of several servers: the same plans, cores and objectives for every variant, one at a time.

In each round every variant is started anew, in turn, and gets the same plans at rising rates. Prompts are
text of the benchmark's tokenizer, one word a token, because one of the peers (sglang-router) takes no token
ids. No prompt of one run occurs in another, so no prefix cache carries over. The load generator runs on the
same cores as the servers, since there are no others; this is the same for all.

Every run is one file in the results folder. A run whose file exists is not repeated, so an interrupted bench
continues where it stopped.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import orjson

from baton.core.errors import SetupError
from benchmarks import goodput_servers
from benchmarks.bench_model import CONTEXT_TOKENS, FIRST_TOKEN, VOCAB
from benchmarks.goodput_result import ANY_OBJECTIVES, Facts, GoodputRun, RunKey, attainment, make_point
from benchmarks.goodput_variants import ServerVariant
from loadgen.client import ServerUrl, request_bytes, send
from loadgen.expected_cache import expected_cache
from loadgen.files import parse_records, write_records
from loadgen.lengths import PlannedRequest, ReplayPlan, TraceScaling, make_plan, parse_factor
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.report import RunSettings
from loadgen.runner import ReplayObserver, replay_plan
from loadgen.slo import Slo
from loadgen.traces import Trace, TraceRequest, cut, read_trace

CONNECTIONS_MAX = 2000
SETTLE_S = 20.0
BLOCK_TOKENS = 32
HOPELESS = 0.4
"""A variant that attains less than this of every pair of objectives is not run at higher rates."""
ROUND_STEP = 2000
"""Each round takes another part of the trace, this many requests further on."""


@dataclass(frozen=True, slots=True)
class TraceUse:
    """One trace and how it is scaled."""

    name: str
    path: Path
    rates: tuple[float, ...]
    """Requests per second."""
    input_scale: str
    output_scale: str
    input_tokens_max: int
    output_tokens_max: int
    start: int = 0
    """Requests of the trace that are skipped."""


@dataclass(frozen=True, slots=True)
class GoodputBench:
    model: Path
    results: Path
    cores: tuple[int, ...]
    traces: tuple[TraceUse, ...]
    objectives: dict[str, Slo]
    rounds: int
    seconds: float
    """Seconds of arrivals in one run."""
    timeout_s: float
    """Seconds until a request counts as failed."""
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Offered:
    """A plan with its prompts and the facts that are shown of it."""

    plan: ReplayPlan
    prompts: PromptMaker
    facts: Facts

    def words(self, request: PlannedRequest) -> str:
        return " ".join(f"w{token}" for token in self.prompts.tokens(request))


async def run(bench: GoodputBench, variants: Sequence[ServerVariant]) -> list[GoodputRun]:
    """Do all missing runs and return all, those of earlier calls included. Raises SetupError if a variant
    does not start or fails outright."""
    bench.results.mkdir(parents=True, exist_ok=True)
    runs: list[GoodputRun] = []
    for number in range(bench.rounds):
        for variant in variants:
            runs += await _round(bench, variant, number)
    return runs


async def _round(bench: GoodputBench, variant: ServerVariant, number: int) -> list[GoodputRun]:
    """Run one round. The variant is started only if a run is missing."""
    keys = _keys(bench, variant, number)
    known = {key: found for key in keys if (found := read_run(bench.results, key)) is not None}
    if not _missing(bench, keys, known):
        return [known[key] for key in keys if key in known]
    bench.progress(f"round {number + 1} of {bench.rounds}: {variant.name} starts")
    logs = bench.results / "logs"
    logs.mkdir(exist_ok=True)
    async with goodput_servers.running(variant, model=bench.model, cores=bench.cores, logs=logs) as server:
        while missing := _missing(bench, keys, known):
            known[missing] = await _one(bench, variant, server, missing)
            bench.progress(
                f"    {missing.trace} {missing.rate:g}/s: {line(known[missing], bench.objectives)}"
            )
    return [known[key] for key in keys if key in known]


def _keys(bench: GoodputBench, variant: ServerVariant, number: int) -> list[RunKey]:
    given = list(bench.objectives) if variant.knows_objectives else [ANY_OBJECTIVES]
    return [
        RunKey(variant.name, trace.name, name, rate, number)
        for trace in bench.traces
        for name in given
        for rate in sorted(trace.rates)
    ]


def _missing(bench: GoodputBench, keys: Sequence[RunKey], known: dict[RunKey, GoodputRun]) -> RunKey | None:
    """The next run, or None. Higher rates than a hopeless one are skipped."""
    hopeless: set[tuple[str, str]] = set()
    for key in keys:
        if (key.trace, key.objectives) in hopeless:
            continue
        if key not in known:
            return key
        slos = [slo for name, slo in bench.objectives.items() if key.objectives in (name, ANY_OBJECTIVES)]
        if all(attainment(known[key], slo) < HOPELESS for slo in slos):
            hopeless.add((key.trace, key.objectives))
    return None


async def _one(bench: GoodputBench, variant: ServerVariant, server: ServerUrl, key: RunKey) -> GoodputRun:
    offered = _offered(bench, key)
    slo = bench.objectives.get(key.objectives)
    await goodput_servers.settle(server, variant.model_name, within_s=SETTLE_S)
    records = await replay_plan(
        offered.plan.requests,
        lambda request: _message(server, variant, offered, request, slo),
        lambda message, record: send(server, message, record, timeout_s=bench.timeout_s),
        connections_max=CONNECTIONS_MAX,
        observer=ReplayObserver(lambda _: None, lambda _: None),
        stop=asyncio.Event(),
    )
    write_records(bench.results / key.file_name, records, _settings(bench, key, offered, server))
    return GoodputRun(key, records, offered.facts)


def _settings(bench: GoodputBench, key: RunKey, offered: Offered, server: ServerUrl) -> RunSettings:
    """The settings that `baton compare` reads. A server that does not know the objectives is shown with the
    tightest."""
    return RunSettings(
        trace=key.trace,
        target=server.origin,
        model=bench.model.name,
        slo=bench.objectives.get(key.objectives)
        or min(bench.objectives.values(), key=lambda s: s.tpot_s or 0.0),
        planned=len(offered.plan.requests),
        label=key.variant,
        kind="bench goodput",
        time_scale=str(offered.facts["time_scale"]),
        options={**offered.facts, "rate": key.rate, "round": key.round, "objectives": key.objectives},
    )


def _message(
    server: ServerUrl, variant: ServerVariant, offered: Offered, request: PlannedRequest, slo: Slo | None
) -> bytes:
    body: dict[str, object] = {
        "model": variant.model_name,
        "prompt": offered.words(request),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if slo is not None:
        body["baton"] = {"timings": True, **objectives_field(slo)}
    return request_bytes(server, "/v1/completions", orjson.dumps(body))


def objectives_field(slo: Slo) -> dict[str, float]:
    """The objectives in milliseconds, as Baton's requests carry them."""
    named = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s}
    return {name: target * 1000 for name, target in named.items() if target is not None}


def _offered(bench: GoodputBench, key: RunKey) -> Offered:
    """The plan of a run. Lengths and instants depend on trace, rate and round alone, so they are the same for
    every variant.

    The words also differ by the objectives, because a server that gets a plan once for each pair must not
    have it cached.
    """
    use = next(t for t in bench.traces if t.name == key.trace)
    words = list(bench.objectives).index(key.objectives) if key.objectives in bench.objectives else 0
    return make_offered(use, rate=key.rate, number=key.round, seconds=bench.seconds, words=words)


@lru_cache(maxsize=4)
def trace_at(path: Path) -> Trace:
    """Read a trace once; every run takes a part of it. Raises SetupError."""
    return read_trace(path)


def make_offered(use: TraceUse, *, rate: float, number: int, seconds: float, words: int = 0) -> Offered:
    """Make a plan. Another number in `words` gives other prompts of the same lengths.

    Raises SetupError if the trace cannot be read or is too short.
    """
    taken = _taken(trace_at(use.path), use, count=max(2, round(rate * seconds)), number=number)
    scaling = TraceScaling(
        parse_factor(use.input_scale),
        parse_factor(use.output_scale),
        _time_scale(taken, rate),
        use.input_tokens_max,
        use.output_tokens_max,
    )
    seed = int(number * 1_000_000 + rate * 1000)
    plan = make_plan(taken, scaling, spread=True, seed=seed)
    longest = max(r.input_tokens + r.output_tokens for r in plan.requests)
    if longest > CONTEXT_TOKENS:
        raise SetupError(
            f"{use.path}: a request of {longest} tokens is longer than the model allows: scale it down"
        )
    prompts = PromptMaker(plan, TokenRange(FIRST_TOKEN, VOCAB), seed=seed + words)
    return Offered(plan, prompts, _facts(use, plan, scaling))


def _taken(whole: Trace, use: TraceUse, *, count: int, number: int) -> Trace:
    """The requests of a run: consecutive ones of a trace without prefixes, or all turns of some conversations
    of a trace with prefixes. Consecutive requests of the latter would share next to nothing, since the
    turns of a conversation are minutes apart."""
    first = use.start + number * ROUND_STEP
    if whole.has_prefixes:
        whole = thinned(whole, count=count, salt=number)
        first = 0
    if first + count > len(whole.requests):
        raise SetupError(
            f"{use.path} is too short: round {number + 1} wants {count} requests from {first} on, and there "
            f"are {len(whole.requests)}"
        )
    return cut(whole, start_s=whole.requests[first].at_s, limit=count)


def thinned(trace: Trace, *, count: int, salt: int) -> Trace:
    """Whole conversations of the trace, drawn at random, that have at least `count` requests together.

    Requests with the same second block belong to one conversation. The first block is the same system prompt
    for all of the Mooncake trace.
    """

    def draw(request: TraceRequest) -> int:
        known = request.hash_ids[1] if len(request.hash_ids) > 1 else f"alone {request.row}"
        return int.from_bytes(blake2b(f"{salt}/{known}".encode(), digest_size=8).digest())

    draws = [draw(request) for request in trace.requests]
    limit = sorted(draws)[min(count, len(draws)) - 1]
    kept = tuple(r for r, drawn in zip(trace.requests, draws, strict=True) if drawn <= limit)
    return replace(trace, requests=kept)


def _time_scale(taken: Trace, rate: float) -> Fraction:
    """The time scale that gives this mean rate. Arrivals will be spread over the last tick, too."""
    span_s = taken.requests[-1].at_s - taken.requests[0].at_s + taken.tick_s
    return Fraction(len(taken.requests) / (span_s * rate)).limit_denominator(10**6)


def _facts(use: TraceUse, plan: ReplayPlan, scaling: TraceScaling) -> Facts:
    count = len(plan.requests)
    return {
        "trace": use.path.name,
        "requests": count,
        "input_scale": str(scaling.input_scale),
        "output_scale": str(scaling.output_scale),
        "time_scale": round(float(scaling.time_scale), 4),
        "input_tokens_max": scaling.input_tokens_max,
        "output_tokens_max": scaling.output_tokens_max,
        "inputs_cut": plan.inputs_cut,
        "outputs_cut": plan.outputs_cut,
        "input_tokens_mean": round(sum(r.input_tokens for r in plan.requests) / count, 1),
        "output_tokens_mean": round(sum(r.output_tokens for r in plan.requests) / count, 1),
        "prefix_hits_possible": round(expected_cache(plan, server_block_tokens=BLOCK_TOKENS).hit_ratio, 4),
    }


def read_run(results: Path, key: RunKey) -> GoodputRun | None:
    """None if it has not been run yet. Raises SetupError if the file is not of this bench."""
    path = results / key.file_name
    if not path.exists():
        return None
    settings, records = parse_records(path.read_bytes(), name=str(path))
    return GoodputRun(key, records, dict(settings.options))


def found(bench: GoodputBench, variants: Sequence[ServerVariant]) -> list[GoodputRun]:
    """The runs of these variants in the results folder."""
    runs: list[GoodputRun] = []
    for number in range(bench.rounds):
        for variant in variants:
            read = (read_run(bench.results, key) for key in _keys(bench, variant, number))
            runs += [run for run in read if run is not None]
    return runs


def line(run: GoodputRun, objectives: dict[str, Slo]) -> str:
    """One line of progress."""
    chosen = {n: s for n, s in objectives.items() if run.key.objectives in (n, ANY_OBJECTIVES)}
    shares = ", ".join(f"{name} {attainment(run, slo):.0%}" for name, slo in chosen.items())
    p = make_point([run], next(iter(chosen.values())))
    times = [
        f"{name} {ms(p50)}/{ms(p90)}"
        for name, p50, p90 in (("TTFT", p.ttft_p50_s, p.ttft_p90_s), ("TPOT", p.tpot_p50_s, p.tpot_p90_s))
    ]
    return f"{shares}; p50/p90 ms {', '.join(times)}; refused {p.refused:.0%}, failed {p.failed:.0%}"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
