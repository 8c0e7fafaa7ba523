"""The phases that the server reports: latency breakdown, balance of the pools, its predictions. Pure."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from loadgen.records import RequestRecord
from loadgen.report.model import (
    Band,
    Calibration,
    LatencyStages,
    PoolBalance,
    PredictionError,
    Predictions,
    WorkerWork,
)
from loadgen.report.sample import Floats, as_floats, percentiles
from loadgen.slo import ClassObjectives

TO_FIRST_TOKEN = ("tokenize", "queue", "route", "retries", "wait", "load", "prefill", "first_hop")
"""Phases of the server before the first token, in the order in which they happen. Their names in `timings`
end in `_s`."""
AFTER_FIRST_TOKEN = ("transfer", "first_decode")
SETTLED_AFTER = 100
_BANDS = (("p50", 40, 60), ("p90", 85, 95), ("p99", 98, 100))
"""A name and the percentiles of TTFT between which the requests of the band lie."""


def latency_breakdown(done: Sequence[RequestRecord]) -> LatencyStages | None:
    """None if no request reports timings."""
    reported = [r for r in done if r.timings and r.ttft_s is not None]
    if not reported:
        return None
    ttft = as_floats(r.ttft_s for r in reported)
    stages = {"client": np.maximum(np.nan_to_num(as_floats(r.lateness_s for r in reported)), 0.0)}
    stages |= {name: _phase(reported, name) for name in TO_FIRST_TOKEN}
    stages["rest"] = np.maximum(ttft - sum(stages.values()), 0.0)
    stages |= {name: _phase(reported, name) for name in AFTER_FIRST_TOKEN}
    bands = [_band("all", np.full(len(reported), True), ttft, stages)]
    for name, low, high in _BANDS:
        from_s, to_s = np.percentile(ttft, (low, high))
        chosen = (ttft >= from_s) & (ttft <= to_s)
        if chosen.any():  # few requests may have none near a percentile
            bands.append(_band(name, chosen, ttft, stages))
    figures = {name: percentiles(values) for name, values in stages.items()}
    return LatencyStages(len(reported), {k: v for k, v in figures.items() if v is not None}, tuple(bands))


def _phase(reported: Sequence[RequestRecord], name: str) -> Floats:
    return as_floats((r.timings or {}).get(f"{name}_s", 0.0) for r in reported)


def _band(name: str, chosen: np.ndarray, ttft: Floats, stages: dict[str, Floats]) -> Band:
    means = {stage: float(values[chosen].mean()) for stage, values in stages.items()}
    return Band(name, int(np.count_nonzero(chosen)), float(ttft[chosen].mean()), means)


def balance(done: Sequence[RequestRecord]) -> PoolBalance | None:
    """None if no request reports its workers."""
    reported = [r for r in done if r.served_by]
    if not reported:
        return None
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for record in reported:
        prompt = record.prompt_tokens or 0
        prefill, decode = counts[record.served_by[0]], counts[record.served_by[-1]]
        prefill[0] += 1
        prefill[1] += prompt
        prefill[2] += prompt - (record.cached_tokens or 0)
        decode[3] += 1
        decode[4] += record.tokens_out
    workers = tuple(WorkerWork(name, *counted) for name, counted in sorted(counts.items()))
    return PoolBalance(
        workers,
        _max_to_mean([w.prompt_tokens for w in workers if w.prefill_requests]),
        _max_to_mean([w.output_tokens for w in workers if w.decode_requests]),
    )


def _max_to_mean(loads: Sequence[int]) -> float | None:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else None


def predictions(done: Sequence[RequestRecord], objectives: ClassObjectives) -> Predictions | None:
    """None if no request reports predictions."""
    ttft = _pairs(done, "predicted_ttft_s", [_sent_to_first(r) for r in done])
    tpot = _pairs(done, "predicted_tpot_s", [r.tpot_s for r in done])
    if not len(ttft) and not len(tpot):
        return None
    return Predictions(
        _error(ttft),
        _error(tpot),
        _error(ttft[SETTLED_AFTER:]),
        _error(tpot[SETTLED_AFTER:]),
        _calibrations(done[SETTLED_AFTER:], objectives),
    )


def _calibrations(settled: Sequence[RequestRecord], objectives: ClassObjectives) -> tuple[Calibration, ...]:
    by_class: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in settled:
        if record.timings:
            by_class[record.slo_class].append(record)
    found = (_calibration(name, records, objectives) for name, records in sorted(by_class.items()))
    return tuple(one for one in found if one is not None)


def _calibration(
    name: str, records: Sequence[RequestRecord], objectives: ClassObjectives
) -> Calibration | None:
    """None if nothing was predicted with a probability."""
    ttft = _pairs(records, "predicted_ttft_p90_s", [_sent_to_first(r) for r in records])
    tpot = _pairs(records, "predicted_tpot_p90_s", [r.tpot_s for r in records])
    said = [
        (r.timings["predicted_meets"], r) for r in records if r.timings and "predicted_meets" in r.timings
    ]
    if not len(ttft) and not len(tpot) and not said:
        return None
    return Calibration(
        name,
        len(records),
        _held(ttft),
        _held(tpot),
        sum(probability for probability, _ in said) / len(said) if said else None,
        sum(objectives.is_met(r) for _, r in said) / len(said) if said else None,
    )


def _held(pairs: Floats) -> float | None:
    """Return the share of measured times that are at most the predicted ones."""
    return float((pairs[:, 1] <= pairs[:, 0]).mean()) if len(pairs) else None


def _sent_to_first(record: RequestRecord) -> float | None:
    if record.ttft_s is None:
        return None
    return record.ttft_s - (record.lateness_s or 0.0)


def _pairs(done: Sequence[RequestRecord], name: str, measured: Sequence[float | None]) -> Floats:
    """[requests, 2]: predicted, measured."""
    rows = [
        (record.timings[name], took_s)
        for record, took_s in zip(done, measured, strict=True)
        if record.timings and name in record.timings and took_s is not None and took_s > 0
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _error(pairs: Floats) -> PredictionError | None:
    if not len(pairs):
        return None
    predicted, measured = pairs[:, 0], pairs[:, 1]
    ape = np.abs(predicted - measured) / measured
    p50, p90 = (float(q) for q in np.percentile(ape, (50, 90)))
    bias = float((predicted - measured).mean() / measured.mean())
    return PredictionError(len(pairs), float(ape.mean()), bias, p50, p90)
