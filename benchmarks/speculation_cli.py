"""`baton bench speculation`."""

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config import EngineConfig, ModelConfig
from baton.files.terminal import new_console
from benchmarks.bench_model import make_bench_model
from benchmarks.speculation import PROMPT_TOKENS, TEXTS, SpeculationLoad, TextResult, TokensDiffer, measure


class SpeculationReport(msgspec.Struct, frozen=True):
    model: str
    draft_model: str
    threads: int
    prompt_tokens: int
    load: SpeculationLoad
    results: list[TextResult]


def speculation(
    model: Annotated[str, typer.Option(help="Hugging Face folder; empty: a random 82 M Llama in bf16.")] = "",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 1,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that run at once.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each sequence.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    draft_model: Annotated[
        str, typer.Option(help="Also speculate with this smaller draft model: Hugging Face folder or hub id.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare output tokens per second with engine.speculation off and on.

    The modes take turns in one run, for text that repeats itself always, half of the time, or never. The exit
    status is 1 if speculation changes a token.

    Example: baton bench speculation --batch 4 --rounds 3
    """
    notes = Console(stderr=True, highlight=False)
    load = SpeculationLoad(batch=batch, tokens=tokens, rounds=rounds)
    settings = EngineConfig(threads=threads, draft_model=draft_model)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        path = str(Path(model).expanduser() if model else make_bench_model(Path(temporary) / "bench-82m"))
        try:
            results = measure(ModelConfig(path=path), settings, load, progress=notes.print)
        except TokensDiffer as error:
            notes.print(f"speculation changes the output: {error}")
            raise typer.Exit(1) from None
    report = SpeculationReport(model or "bench-82m", draft_model, threads, PROMPT_TOKENS, load, results)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _show(report)


def _show(report: SpeculationReport) -> None:
    load = report.load
    table = Table(
        title=f"{report.model}, {report.threads} thread(s), {load.batch} x {load.tokens} tokens, "
        f"medians of {load.rounds} rounds\nratio: to off in the same round; the tokens are the same"
    )
    for column in ("text", "speculation", "tok/s", "ratio", "range", "drafted", "accepted"):
        is_text = column in ("text", "speculation")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for r in report.results:
        counts = (str(r.drafted), str(r.accepted)) if r.mode != "off" else ("", "")
        spread = f"{r.ratio_min:.2f}–{r.ratio_max:.2f}" if r.mode != "off" else ""
        table.add_row(r.text, r.mode, f"{r.tokens_per_s:.1f}", f"{r.ratio:.2f}", spread, *counts)
    console = new_console(highlight=False)
    console.print(table)
    for name, what in TEXTS.items():
        console.print(f"{name}: {what}")
