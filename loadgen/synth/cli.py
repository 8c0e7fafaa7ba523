"""`baton synth` makes synthetic traces that resemble a production trace, from a few numbers fitted to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.outputs import check_apart, check_writable, is_stdout, opened, write_whole
from baton.files.terminal import new_console
from loadgen.formats.base import TRACE_BLOCK_TOKENS, Trace, TraceFormat, TraceRequest
from loadgen.synth.fit import fit, spread_trace
from loadgen.synth.generate import stream, synthesize
from loadgen.synth.goodness import Goodness, compare
from loadgen.synth.library import names, params_of
from loadgen.synth.params import FitSource, SynthParams, to_toml
from loadgen.traces import read_trace

_Source = Annotated[str, typer.Argument(help="Built-in name, parameter file (.toml), or a trace to fit.")]
_Requests = Annotated[
    int | None, typer.Option(min=1, help="Number of requests; default: as many as the fitted trace has.")
]
_Duration = Annotated[float | None, typer.Option(min=0, help="Make the requests of this many seconds.")]
_Rate = Annotated[
    float | None, typer.Option(min=0, help="Mean requests per second, as from more or fewer users.")
]
_Seed = Annotated[int, typer.Option(help="Random seed; each seed gives another trace of the same kind.")]
_Out = Annotated[str, typer.Option(help="Write the trace to this file, as JSON lines; - is standard output.")]
_Plain = Annotated[bool, typer.Option("--plain", help="Write only the four fields of Mooncake's traces.")]
_Save = Annotated[str, typer.Option(help="Write the fitted parameters to this file; - is standard output.")]
_Check = Annotated[Path | None, typer.Option(help="Compare the parameters with this trace.")]
_Format = Annotated[
    TraceFormat | None,
    typer.Option("--format", help="Format of the trace; default: detected from its content."),
]
_Json = Annotated[
    str, typer.Option("--json", help="Write the comparison to this file; - is standard output.")
]


def synth(
    source: _Source,
    requests: _Requests = None,
    duration: _Duration = None,
    rate: _Rate = None,
    seed: _Seed = 0,
    out: _Out = "",
    plain: _Plain = False,
    save: _Save = "",
    check: _Check = None,
    trace_format: _Format = None,
    json_to: _Json = "",
) -> None:
    """Make a synthetic trace, or fit the parameters of a trace and show how good the fit is.

    baton synth mooncake-conversation --requests 5000 --out x.jsonl

    baton synth my_trace.csv --save mine.toml, then: baton replay synth:mine.toml --url ...
    """
    try:
        _check_options(source, requests, duration, rate, out, save, check, json_to)
        check_writable(out, save, json_to)
        params, original = _params(source, check, trace_format)
        if original is not None:
            goodness = compare(original, synthesize(params, seed=seed, requests=len(original.requests)))
            show(new_console(stderr=any(map(is_stdout, (out, save, json_to)))), source, goodness)
            if json_to:
                comparison = orjson.dumps(
                    goodness.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
                )
                write_whole(json_to, [comparison])
        if save:
            write_whole(save, [to_toml(params).encode()])
        if out:
            made = stream(params, seed=seed, requests=requests, duration_s=duration, requests_per_s=rate)
            with opened(out) as file:
                file.writelines(row.encode() for row in rows(made, params.block_tokens, plain=plain))
        if original is None and not (out or save):
            raise SetupError("nothing to do: give --out for a trace, or --check TRACE for a comparison")
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None


def _check_options(
    source: str,
    requests: int | None,
    duration: float | None,
    rate: float | None,
    out: str,
    save: str,
    check: Path | None,
    json_to: str,
) -> None:
    """Raises SetupError if an option would have no effect, or would overwrite another output."""
    is_trace = not _has_params(source)
    if requests is not None and duration is not None:
        raise SetupError("--requests and --duration: give one of them")
    if check is not None and is_trace:
        raise SetupError(
            f"--check: {source} is fitted, and compared with what it was fitted to; to compare its "
            "parameters with another trace, --save them and give that file"
        )
    if json_to and check is None and not is_trace:
        raise SetupError("--json writes the comparison of a trace with its parameters: give --check TRACE")
    if not out and not (requests is None and duration is None and rate is None):
        raise SetupError("--requests, --duration and --rate describe the trace to make: give --out FILE")
    check_apart({"--out": out, "--save": save, "--json": json_to})


def _has_params(source: str) -> bool:
    return source in names() or source.endswith(".toml")


def _params(
    source: str, check: Path | None, trace_format: TraceFormat | None
) -> tuple[SynthParams, Trace | None]:
    """The parameters, and the trace to compare with, whose arrivals are spread inside its ticks."""
    if _has_params(source):
        original = None if check is None else spread_trace(read_trace(check, format=trace_format))
        return params_of(source), original
    if not Path(source).exists():
        raise SetupError(
            f"{source} is neither a file nor a built-in name; built-in names are {', '.join(names())}"
        )
    trace = read_trace(Path(source), format=trace_format)
    return fit(trace, source=FitSource(name=Path(source).name)), spread_trace(trace)


def rows(made: Iterator[TraceRequest], block_tokens: int, *, plain: bool) -> Iterator[str]:
    """JSON lines as `loadgen.formats.mooncake` reads them. Instants are whole milliseconds, as in Mooncake's
    traces."""
    for r in made:
        row: dict[str, object] = {
            "timestamp": round(r.at_s * 1000),
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
        }
        if block_tokens:
            row["hash_ids"] = r.hash_ids
        if not plain:
            if r.session is not None:
                row["session_id"] = r.session
            if r.think_s is not None:
                row["delay"] = round(r.think_s * 1000)
            if block_tokens not in (0, TRACE_BLOCK_TOKENS):
                row["block_tokens"] = block_tokens
        yield orjson.dumps(row).decode() + "\n"


def show(console: Console, name: str, goodness: Goodness) -> None:
    table = Table(title=f"{name}: original and synthetic", title_justify="left")
    for column in ("", "original", "synthetic", "KS distance"):
        table.add_column(column, justify="right" if column else "left")
    for figure in goodness.figures:
        table.add_row(figure.name, f"{figure.original:.4g}", f"{figure.synthetic:.4g}", "")
    for distance in goodness.distances:
        table.add_row(distance.name, "", "", f"{distance.ks:.4f}")
    for ratio in goodness.hit_ratios:
        size = "no bound" if ratio.capacity_blocks is None else f"{ratio.capacity_blocks:,} blocks"
        table.add_row(f"LRU hit ratio, {size}", f"{ratio.original:.4f}", f"{ratio.synthetic:.4f}", "")
    console.print(table)
    verdict = "[green]close[/]" if goodness.is_close else "[bold red]NOT close[/]"
    worst = max(d.ks for d in goodness.distances)
    console.print(
        f"{verdict}: hit ratios differ by {goodness.hit_ratio_gap:.4f} "
        f"(allowed {goodness.hit_ratio_tolerance}), "
        f"KS distances up to {worst:.4f} (allowed {goodness.ks_tolerance})"
    )
