"""`baton bench parallel`."""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.bench_model import WIDE, make_bench_model
from benchmarks.parallel import links as links_bench
from benchmarks.parallel import measure as model_bench
from benchmarks.parallel import predictions
from benchmarks.parallel.cores import cores_to_use
from benchmarks.parallel.links import WAKE, LinkResult, LinkSizes
from benchmarks.parallel.measure import MemoryResult, ModelSizes, ShapeResult
from benchmarks.parallel.predictions import PredictedTime, PredictionResult
from simulator.divided import MeasuredRank

PARTS = ("links", "tensor", "pipeline", "context", "memory", "predict")


class ParallelReport(msgspec.Struct, frozen=True):
    cores: tuple[int, ...]
    load_before: float
    """The machine's load (one minute) when the run began."""
    load_after: float
    links: LinkResult | None
    shapes: list[ShapeResult]
    memory: list[MemoryResult]
    one_rank: MeasuredRank | None
    """What `baton simulate --costs` reads."""
    predictions: list[PredictedTime]


def parallel(
    model: Annotated[str, typer.Option(help="Hugging Face folder; empty: a random 82 M Llama in bf16.")] = "",
    wide: Annotated[bool, typer.Option(help="A random 316 M Llama of wider layers instead.")] = False,
    parts: Annotated[
        str, typer.Option(metavar="PART,…", help="What to measure; default: all.", show_default=False)
    ] = ",".join(PARTS),
    prefill_tokens: Annotated[str, typer.Option(help="Prompts of one chunk at tensor 2.")] = "512,2048",
    batches: Annotated[str, typer.Option(help="Sequences in a decode step.")] = "1,8,32",
    context_tokens: Annotated[int, typer.Option(min=1, help="Context of those sequences.")] = 512,
    long_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt at pipeline 2 and context 2.")
    ] = 8192,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds in which workers take turns.")] = 7,
    calls: Annotated[int, typer.Option(min=1, help="Sums and plans of each kind in a round.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare workers of two ranks with workers of one rank on the same two cores.

    Sums over ranks stand beside memcpy of the same bytes; tensor 2 beside one rank of two threads; pipeline 2
    and context 2 beside one rank on one core; memory of a rank beside that of the whole model on one;
    predicted times beside measured ones. Parts are links, tensor, pipeline, context, memory and predict.

    Example: baton bench parallel --wide --parts tensor,pipeline --rounds 5
    """
    wanted = _parts(parts)
    if wide and model:
        raise SetupError("--wide makes a model of its own: leave --model out")
    if model and not Path(model).expanduser().is_dir():
        raise SetupError(f"--model {model}: it is no folder, as Hugging Face has them")
    sizes = ModelSizes(
        prefill_tokens=_numbers("--prefill-tokens", prefill_tokens),
        batches=_numbers("--batches", batches),
        context_tokens=context_tokens,
        long_prompt_tokens=long_prompt_tokens,
        rounds=rounds,
    )
    link_sizes = LinkSizes(calls=calls, plans=calls, rounds=rounds)
    report = _measure(model, wanted, sizes, link_sizes, is_wide=wide)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    _show(report)


def _measure(
    model: str, parts: set[str], sizes: ModelSizes, link_sizes: LinkSizes, *, is_wide: bool
) -> ParallelReport:
    progress = Console(stderr=True, highlight=False).print
    cores, load_before = cores_to_use(), os.getloadavg()[0]
    needs_links = parts & {"links", "predict"}
    links = links_bench.measure(link_sizes, cores, progress=progress) if needs_links else None
    shapes: list[ShapeResult] = []
    memory: list[MemoryResult] = []
    predicted: PredictionResult | None = None
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        if parts - {"links"}:
            folder = _folder(model, Path(temporary), is_wide=is_wide)
            if "tensor" in parts:
                shapes.append(model_bench.tensor_2(folder, sizes, cores, progress=progress))
            for part, shape in (("pipeline", "pp2"), ("context", "cp2")):
                if part in parts:
                    found = model_bench.beside_one_core(shape, folder, sizes, cores, progress=progress)
                    shapes.append(found)
            if "memory" in parts:
                memory = model_bench.memory(folder, sizes, cores, progress=progress)
            if "predict" in parts and links is not None:
                predicted = predictions.measure(folder, sizes, links, cores, progress=progress)
    return ParallelReport(
        cores,
        load_before,
        os.getloadavg()[0],
        links,
        shapes,
        memory,
        predicted.one_rank if predicted is not None else None,
        predicted.predictions if predicted is not None else [],
    )


def _folder(model: str, temporary: Path, *, is_wide: bool) -> Path:
    if model:
        return Path(model).expanduser()
    return (
        make_bench_model(temporary / "wide", WIDE) if is_wide else make_bench_model(temporary / "bench-82m")
    )


def _parts(text: str) -> set[str]:
    found = {part.strip() for part in text.split(",")}
    if not found <= set(PARTS):
        raise SetupError(f"--parts {text}: choose of {', '.join(PARTS)}, separated by commas")
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise SetupError(f"{option} {text}: write whole numbers of at least 1, separated by commas")
    return values


def _show(report: ParallelReport) -> None:
    console = new_console()
    console.print(f"cores {report.cores}, load {report.load_before:.1f} to {report.load_after:.1f}")
    if report.links is not None:
        console.print(_sums_table(report.links), _plans_table(report.links))
    for result in report.shapes:
        console.print(_shape_table(result))
        if result.profiles:
            console.print(_profile_table(result))
    if report.memory:
        console.print(_memory_table(report.memory))
    if report.predictions:
        console.print(_predictions_table(report.predictions))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _sums_table(links: LinkResult) -> Table:
    table = _table("All-reduce over two ranks, p50", "dtype", "KiB", "us", "memcpy us", "ratio")
    for one in links.sums:
        times = (f"{s * 1e6:.1f}" for s in (one.all_reduce_s, one.memcpy_s))
        table.add_row(one.dtype, str(one.size_bytes // 1024), *times, f"{one.ratio:.1f}")
    return table


def _plans_table(links: LinkResult) -> Table:
    table = _table("A plan to a follower that sleeps, until it is decoded", "items", "p50 us", "p99 us")
    for one in links.plans:
        name = "waking it" if one.items == WAKE else str(one.items)
        table.add_row(name, *(f"{s * 1e6:.0f}" for s in (one.p50_s, one.p99_s)))
    return table


def _shape_table(result: ShapeResult) -> Table:
    title = f"{result.shape} beside {result.alone}, best round (all rounds); ratio: {result.shape} to alone"
    table = _table(title, "work", "case", "alone ms", f"{result.shape} ms", "time ratio", "speed ratio")
    for one in result.comparisons:
        times = (f"{min(seconds) * 1e3:.2f}" for seconds in (one.alone_s, one.together_s))
        slower = f"{one.best_ratio:.2f} ({one.ratio:.2f})"
        table.add_row(one.work, one.case, *times, slower, f"{1 / one.best_ratio:.2f} ({1 / one.ratio:.2f})")
    return table


def _profile_table(result: ShapeResult) -> Table:
    names = list(dict.fromkeys(name for one in result.profiles for name in one.parts))
    table = _table("The leader's decode step, ms", "shape", "batch", *names, "all")
    for one in result.profiles:
        parts = (f"{one.parts[name] * 1e3:.3f}" if name in one.parts else "" for name in names)
        table.add_row(one.shape, str(one.batch), *parts, f"{sum(one.parts.values()) * 1e3:.2f}")
    return table


def _memory_table(results: list[MemoryResult]) -> Table:
    title = (
        "Peak resident memory of a rank, MB, after a prompt that fills the KV pool\n"
        "model: peak without what a process has before it loads; ratio: largest rank to one rank"
    )
    table = _table(title, "shape", "rank", "peak", "model", "KV pool", "peak ratio", "model ratio")
    alone = results[0].alone
    rows = [("1", 0, alone, "", "")]
    for one in results:
        ratios = (f"{one.peak_ratio:.2f}", f"{one.model_ratio:.2f}")
        rows += [
            (one.shape, number, rank, *(ratios if not number else ("", "")))
            for number, rank in enumerate(one.ranks)
        ]
    for shape, number, rank, *ratios in rows:
        sizes = (f"{size / 1e6:.0f}" for size in (rank.peak, rank.model, rank.kv_pool))
        table.add_row(shape, str(number), *sizes, *ratios)
    return table


def _predictions_table(found: list[PredictedTime]) -> Table:
    title = (
        "Predicted times beside measured ones, medians of the rounds:\n"
        "the worker's step-time model, and baton simulate"
    )
    table = _table(title, "work", "case", "shape", "measured ms", "step time", "error", "simulate", "error")
    for one in found:
        cells = [
            text
            for seconds in (one.step_time_s, one.simulated_s)
            for text in (f"{statistics.median(seconds) * 1e3:.2f}", f"{one.error(seconds):+.0%}")
        ]
        measured_ms = statistics.median(one.measured_s) * 1e3
        table.add_row(one.work, one.case, one.shape, f"{measured_ms:.2f}", *cells)
    return table
