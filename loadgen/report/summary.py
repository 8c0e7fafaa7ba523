"""The figures that come first in every table of one run or of several. Pure."""

from collections.abc import Callable, Sequence

from loadgen.report.model import Report
from loadgen.units import count, per_second, seconds, share, times

Show = Callable[[float | None], str]
Row = tuple[str, str, Show, str]
"""A name, a path into a report, how it is shown, and which is better: `high`, `low` or neither."""

SUMMARY: tuple[Row, ...] = (
    ("Goodput, share of judged", "goodput_share", share, "high"),
    ("Goodput, requests", "goodput_per_s", per_second, "high"),
    ("TTFT objective met", "ttft_attained.share", share, "high"),
    ("TPOT objective met", "tpot_attained.share", share, "high"),
    ("Offered", "offered", count, ""),
    ("Offered, rate", "offered_per_s", per_second, ""),
    ("Completed", "completed", count, ""),
    ("Refused", "refused", count, "low"),
    ("Failed", "failed", count, "low"),
    ("Given up as planned", "cancelled", count, ""),
    ("TTFT p50", "ttft.p50", seconds, "low"),
    ("TTFT p99", "ttft.p99", seconds, "low"),
    ("TPOT p50", "tpot.p50", seconds, "low"),
    ("TPOT p99", "tpot.p99", seconds, "low"),
    ("ITL p99", "itl.p99", seconds, "low"),
    ("End to end p99", "e2e.p99", seconds, "low"),
    ("Prompt tokens", "prompt_tokens_per_s", per_second, "high"),
    ("Output tokens", "output_tokens_per_s", per_second, "high"),
    ("Answers shorter than asked", "short_answers.shorter", count, "low"),
    ("Cache hits, prompt tokens", "cache_hit_ratio", share, "high"),
    ("Cache hits expected of LRU", "settings.expected_hit_ratio", share, ""),
    ("Most stringent SLO scale", "slo_scales.most_stringent", times, "low"),
    ("Highest rate at the goal", "search.rate_per_s", per_second, "high"),
    ("Prompt tokens, busiest worker to mean", "balance.prompt_tokens_max_to_mean", times, "low"),
    ("Output tokens, busiest worker to mean", "balance.output_tokens_max_to_mean", times, "low"),
    ("Predicted TTFT, mean error", "predictions.ttft.mape", share, "low"),
    ("Predicted TPOT, mean error", "predictions.tpot.mape", share, "low"),
    ("Generator's lateness p99", "lateness.p99", seconds, "low"),
)


def look_up(value: object, path: str) -> object:
    """The attribute, key or index at a dotted path; None where the path ends."""
    for part in path.split("."):
        if value is None:
            return None
        if isinstance(value, (tuple, list)):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def number_at(report: Report, path: str) -> float | None:
    value = look_up(report, path)
    return float(value) if isinstance(value, (int, float)) else None


def summary_rows(reports: Sequence[Report]) -> list[tuple[Row, list[float | None]]]:
    """The figures that at least one of the reports has."""
    rows = [(row, [number_at(r, row[1]) for r in reports]) for row in SUMMARY]
    return [(row, values) for row, values in rows if any(v is not None for v in values)]


DIFFERENT_RATE = 0.02


def differences(reports: Sequence[Report]) -> dict[str, list[str]]:
    """The settings that differ between runs, with their values, because figures then differ for that reason,
    too."""
    values_of: dict[str, list[str]] = {
        "trace": [r.settings.trace for r in reports],
        "offered rate": [per_second(r.offered_per_s) for r in reports],
        "objectives": [_objectives(r) for r in reports],
        "goal": [f"{r.settings.attain:.0%}" for r in reports],
    }
    for option in ("length_scale", "output_scale"):
        values_of[option] = [str(r.settings.options.get(option, "-")) for r in reports]
    rates = [r.offered_per_s for r in reports]
    if rates and max(rates) <= min(rates) * (1 + DIFFERENT_RATE):
        del values_of["offered rate"]
    return {what: values for what, values in values_of.items() if len(set(values)) > 1}


def _objectives(report: Report) -> str:
    by_class = [f"{name}: {slo}" for name, slo in sorted(report.settings.class_slos.items())]
    return "; ".join((str(report.settings.slo), *by_class))


def ratio_to_first(values: Sequence[float | None], run: int) -> float | None:
    """None for the first run, and if the divisor is missing or 0."""
    base, value = values[0], values[run]
    return value / base if run and base and value is not None else None
