"""The parts of `baton bench experts` that run expert ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.experts.service import (
    BESIDE_IDLE_MIN,
    SERVICE,
    SKEW,
    THROUGHPUT_MIN,
    ServiceReport,
    make_moe_model,
    measure_service,
)
from benchmarks.experts.skew import GAIN_MIN, SkewReport, measure_skew

ROWS = ("exact", "model", "int8")
SKEW_S_MIN = 24.0


def run_ranks_part(part: str, *, rounds: int, seconds: float, rows: str, seed: int, as_json: bool) -> None:
    """Measure and print. Raises SetupError."""
    if rows not in ROWS:
        raise SetupError(f"--rows {rows}: choose of {', '.join(ROWS)}")
    progress = Console(stderr=True, highlight=False).print
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        report = _measure(part, Path(folder), rounds, seconds, rows, seed, progress)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    elif isinstance(report, SkewReport):
        _show_skew(report)
    else:
        _show_service(report)


def _measure(
    part: str,
    folder: Path,
    rounds: int,
    seconds: float,
    rows: str,
    seed: int,
    progress: Callable[[str], None],
) -> ServiceReport | SkewReport:
    sizes = SERVICE if part == "service" else SKEW
    progress(f"a random bf16 model of {sizes.layers} layers with {sizes.experts} experts is made")
    model = make_moe_model(folder / "model", sizes)
    if part == "service":
        return measure_service(model, rounds=rounds, seconds=seconds, rows=rows, progress=progress)
    return measure_skew(model, seconds=max(SKEW_S_MIN, seconds), seed=seed, progress=progress)


def _show_service(report: ServiceReport) -> None:
    table = Table(title="Tokens per second of two cores: two workers and two expert ranks, one process")
    for column in ("round", "prefill", "one process", "decode", "one process"):
        table.add_column(column, justify="right")
    for number, (ours, whole) in enumerate(zip(report.divided, report.whole, strict=True), 1):
        rates = (ours.prefill, whole.prefill, ours.decode, whole.decode)
        table.add_row(str(number), *(f"{rate:.0f}" for rate in rates))
    console = new_console()
    console.print(table)
    console.print(
        f"Medians of the ratios: prefill {report.ratio('prefill'):.2f}, decode {report.ratio('decode'):.2f} "
        f"(aim: at least {THROUGHPUT_MIN}). Dispatch and combine move "
        f"{report.combine_bytes_per_s / 1e9:.1f} GB/s, a memcpy {report.copy_bytes_per_s / 1e9:.1f} GB/s. "
        f"Beside three idle workers one decodes at {report.beside_idle:.2f} of its speed alone (aim: "
        f"{BESIDE_IDLE_MIN} or more)."
    )


def _show_skew(report: SkewReport) -> None:
    new_console().print(
        f"Tokens per second with the popular experts moving: {report.fixed:.0f} with a fixed placement, "
        f"{report.rebalanced:.0f} with rebalancing ({report.migrations} experts migrated): "
        f"{report.gain:.2f} times (aim: at least {GAIN_MIN})."
    )
