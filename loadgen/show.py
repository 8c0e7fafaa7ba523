"""Tables of a report, or of several side by side, on a terminal."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from loadgen.report.model import Percentiles, PredictionError, Report, ReportGroup, WorkerWork
from loadgen.report.phases import AFTER_FIRST_TOKEN
from loadgen.report.summary import differences, ratio_to_first, summary_rows
from loadgen.slo import Slo
from loadgen.sources import SYNTH
from loadgen.units import count, per_second, seconds, share, three_digits, tick_seconds, times

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GROUPS_MAX = 20
WORKERS_MAX = 16
_LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2e", "end to end"),
    ("lateness", "our lateness"),
)
_PERCENTILES = ("p50", "p90", "p95", "p99", "mean", "max")


def show_report(console: Console, report: Report) -> None:
    """Print every part that the report has."""
    s = report.settings
    kind = f" ({s.trace_format})" if s.trace_format and not s.trace.startswith(SYNTH) else ""
    options = ", ".join(f"{name} {value}" for name, value in s.options.items() if value is not None)
    console.print(f"\n[bold]{escape(s.trace)}[/]{kind}, {escape(s.model)} at {escape(s.target)}")
    console.print(
        escape(f"time scale {s.time_scale}, seed {s.seed}{', ' if options else ''}{options}"), style="dim"
    )
    for part in _parts(report):
        console.print(part)
    if report.interrupted:
        console.print(f"[yellow]Stopped early:[/] {report.offered} of {s.planned} requests were offered.")
    if report.generator.warning:
        console.print(
            f"[bold red]WARNING: the load generator did not keep up:[/] {escape(report.generator.warning)}"
        )


def _parts(report: Report) -> list[RenderableType]:
    parts: list[RenderableType | None] = [
        _counts(report),
        _latencies(report),
        _rates(report),
        _groups(report.classes, "class"),
        _groups(report.tenants, "tenant"),
        _latency_breakdown(report),
        _balance(report),
        _predictions(report),
        _calibration(report),
        _scales(report),
        _search(report),
    ]
    return [part for part in parts if part is not None]


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold italic")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _counts(report: Report) -> Table:
    table = _table(
        f"Requests in {seconds(report.duration_s)}",
        (),
        ("planned", "offered", "completed", "refused", "failed", "given up"),
    )
    table.add_column("reason")
    details = [f"{n} {reason}" for reason, n in report.refusals.items()]
    details += [f"{n} {reason}" for reason, n in report.failures.items()]
    counts = (report.offered, report.completed, report.refused, report.failed, report.cancelled)
    text = escape("; ".join(details)) or "-"
    table.add_row(count(report.settings.planned), *(count(c) for c in counts), text)
    return table


def _latencies(report: Report) -> Table:
    table = _table("From the planned instant, completed requests", ("",), _PERCENTILES)
    for name, text in _LATENCIES:
        figures: Percentiles | None = getattr(report, name)
        table.add_row(text, *(seconds(getattr(figures, p, None)) for p in _PERCENTILES))
    return table


def _goodput(report: Report) -> str:
    g = report.goodput
    if not g.judged:
        return "nobody is judged"
    return f"{share(g.share)} ({share(g.low)} to {share(g.high)}), {per_second(report.goodput_per_s)}"


def _rates(report: Report) -> Table:
    r = report
    rows = (
        (
            f"goodput ({r.settings.slo})",
            _goodput(r),
        ),
        ("TTFT, TPOT target met", f"{share(r.ttft_attained.share)}, {share(r.tpot_attained.share)}"),
        ("offered, completed requests", f"{per_second(r.offered_per_s)}, {per_second(r.requests_per_s)}"),
        (
            "prompt, output tokens",
            f"{per_second(r.prompt_tokens_per_s)}, {per_second(r.output_tokens_per_s)}",
        ),
        ("cache hits, measured", _hits(r.cache_hit_ratio, "the server does not say")),
        ("cache hits, expected of LRU", _hits(r.settings.expected_hit_ratio, "not comparable")),
    )
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    if (short := r.short_answers) is not None and short.shorter:
        text = f"{count(short.shorter)} of {count(short.counted)}, mean {share(short.mean_share)}"
        table.add_row("answers shorter than asked", text)
    if r.answers is not None:
        same = r.answers.compared - r.answers.differing
        table.add_row("answers as in the earlier run", f"{count(same)} of {count(r.answers.compared)}")
    return table


def _hits(ratio: float | None, otherwise: str) -> str:
    return otherwise if ratio is None else f"{ratio:.2%} of prompt tokens"


def _groups(groups: Sequence[ReportGroup], kind: str) -> Table | None:
    if not groups:
        return None
    names = ("offered", "refused", "goodput", "met TTFT, TPOT", "TTFT p50, p99", "TPOT p50, p99")
    table = _table(f"By {kind}", (kind,), names)
    for g in groups[:GROUPS_MAX]:
        slo = "" if g.slo is None else f"\n{_targets(g.slo)}"
        table.add_row(
            f"{escape(g.name) or '(none)'}[dim]{slo}[/]",
            count(g.offered),
            count(g.refused),
            share(g.goodput_share),
            f"{g.ttft_attained.share * 100:.1f}, {share(g.tpot_attained.share)}",
            *(f"{seconds(f.p50)}, {seconds(f.p99)}" if f else "-" for f in (g.ttft, g.tpot)),
        )
    if len(groups) > GROUPS_MAX:
        table.add_row(f"... {len(groups) - GROUPS_MAX} more in the JSON")
    return table


def _targets(slo: Slo) -> str:
    return ", ".join("-" if t is None else tick_seconds(t) for t in (slo.ttft_s, slo.tpot_s))


def _latency_breakdown(report: Report) -> Table | None:
    """Mean times of the stages, by band of TTFT."""
    if report.latency_breakdown is None:
        return None
    bands = report.latency_breakdown.bands
    heads = [f"{b.name} {seconds(b.ttft_s)}" for b in bands]
    table = _table("Where the time went, means by TTFT", ("",), heads)
    for stage in report.latency_breakdown.stages:
        if stage == AFTER_FIRST_TOKEN[0]:
            table.add_section()
        table.add_row(stage.replace("_", " "), *(seconds(b.stages[stage]) for b in bands))
    return table


def _balance(report: Report) -> Table | None:
    if report.balance is None:
        return None
    b = report.balance
    text = ", ".join(
        f"{name} {times(ratio)}"
        for name, ratio in (("prompt", b.prompt_tokens_max_to_mean), ("output", b.output_tokens_max_to_mean))
        if ratio is not None
    )
    heads = ("prefills", "prompt tokens", "computed", "decodes", "output tokens")
    table = _table(f"Workers; tokens of the busiest to the mean: {text or '-'}", ("",), heads)
    busiest = sorted(b.workers, key=lambda w: (-w.prompt_tokens - w.output_tokens, w.name))[:WORKERS_MAX]
    for worker in sorted(busiest, key=lambda w: w.name):
        table.add_row(escape(worker.name), *(count(n) for n in _work(worker)))
    if len(b.workers) > WORKERS_MAX:
        table.add_row(f"... {len(b.workers) - WORKERS_MAX} less busy")
    return table


def _work(w: WorkerWork) -> tuple[int, ...]:
    return w.prefill_requests, w.prompt_tokens, w.computed_tokens, w.decode_requests, w.output_tokens


def _predictions(report: Report) -> Table | None:
    if report.predictions is None:
        return None
    p = report.predictions
    rows: tuple[tuple[str, PredictionError | None], ...] = (
        ("TTFT", p.ttft),
        ("TPOT", p.tpot),
        ("TTFT after 100 requests", p.ttft_settled),
        ("TPOT after 100 requests", p.tpot_settled),
    )
    table = _table(
        "The server's predictions", ("",), ("requests", "mean error", "bias", "p50 error", "p90 error")
    )
    for name, e in rows:
        if e is not None:
            table.add_row(
                name, count(e.count), share(e.mape), f"{e.bias:+.1%}", share(e.ape_p50), share(e.ape_p90)
            )
    return table


def _calibration(report: Report) -> Table | None:
    if report.predictions is None or not report.predictions.calibration:
        return None
    heads = ("requests", "TTFT within its p90", "TPOT within its p90", "objectives hold: said", "held")
    table = _table("What the server said with a probability, after 100 requests", ("class",), heads)
    for c in report.predictions.calibration:
        shares = (c.ttft_p90_held, c.tpot_p90_held, c.meets_said, c.meets_held)
        cells = ("-" if value is None else share(value) for value in shares)
        table.add_row(escape(c.slo_class or "default"), count(c.count), *cells)
    return table


def _scales(report: Report) -> RenderableType | None:
    slo = report.settings.slo
    if slo.ttft_s is None and slo.tpot_s is None and not report.settings.class_slos:
        return None
    scales = report.slo_scales
    most = "none does" if scales.most_stringent is None else f"{three_digits(scales.most_stringent)}x"
    title = f"Both targets scaled; most stringent that {report.settings.attain:.0%} meet: {most}"
    if all(p.rate_per_s is None for p in scales.points):
        text = ", ".join(f"{p.scale:g}x {share(p.share)}" for p in scales.points)
        return f"[bold italic]{title}[/]\nat this rate: {text}"
    table = _table(title, (), ("scale", "attained", "highest rate"))
    for p in scales.points:
        table.add_row(f"{p.scale:g}x", share(p.share), per_second(p.rate_per_s))
    return table


def _search(report: Report) -> Table | None:
    if report.search is None:
        return None
    s = report.search
    found = "no rate" if s.rate_per_s is None else f"{three_digits(s.rate_per_s)} requests per second"
    title = f"Goodput: {found} at which {s.attain:.0%} meet both targets. {s.reason.capitalize()}."
    table = _table(title, (), ("rate", "met", "of", "share", "interval"))
    table.add_column("")
    for p in s.probes:
        text = "stopped: out of reach" if p.aborted else ("" if p.share >= s.attain else "misses the goal")
        interval = f"{share(p.low)} to {share(p.high)}"
        table.add_row(per_second(p.rate_per_s), count(p.met), count(p.judged), share(p.share), interval, text)
    return table


def show_comparison(console: Console, reports: Sequence[Report], *, with_scales: bool = False) -> None:
    """One column per run, with its ratio to the first. `with_scales` says that SLO scales were requested."""
    console.print()
    for run, report in enumerate(reports):
        s = report.settings
        console.print(
            f"[bold]{LETTERS[run]}[/] {escape(report.label)}: {escape(s.trace)}, {s.slo}", highlight=False
        )
    table = Table()
    table.add_column("")
    for run in range(len(reports)):
        table.add_column(LETTERS[run], justify="right")
        if run:
            table.add_column(f"{LETTERS[run]} / A", justify="right", style="dim")
    for (name, _, shown, _), values in summary_rows(reports):
        cells: list[str] = []
        for run, value in enumerate(values):
            cells.append(shown(value))
            if run:
                ratio = None if shown is count else ratio_to_first(values, run)
                cells.append("" if ratio is None else times(ratio))
        table.add_row(name, *cells)
    console.print(table)
    if with_scales:
        console.print(_compared_scales(reports))
    for what, values in differences(reports).items():
        text = ", ".join(f"{LETTERS[run]} {value}" for run, value in enumerate(values))
        console.print(f"[yellow]Not the same {what}:[/] {escape(text)}", highlight=False)
    for run, report in enumerate(reports):
        if report.generator.warning:
            console.print(f"[bold red]WARNING[/] {LETTERS[run]}: {escape(report.generator.warning)}")


def _compared_scales(reports: Sequence[Report]) -> Table:
    table = _table("Share that meets both targets times", ("scale",), LETTERS[: len(reports)])
    shares = [{p.scale: p.share for p in r.slo_scales.points} for r in reports]
    for scale in sorted({scale for known in shares for scale in known}):
        table.add_row(f"{scale:g}x", *(share(known.get(scale)) for known in shares))
    return table
