"""`baton bench products`."""

from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.products import KINDS, ROWS, SHAPES, ProductBench, ProductResult
from engine.native.build import NativeUnavailable
from engine.native.classes import processor_name


def products(
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas between.")] = ",".join(
        map(str, ROWS)
    ),
    only: Annotated[str, typer.Option(help="Shapes whose names contain this; empty: all.")] = "",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare products of quantised weights with bf16's and with torch's, by number of rows.

    int8, int4 and W8A8 are what model.quantization makes; q8_0 and q4_1 are formats of GGUF files.

    Example: baton bench products --rows 1,8,32 --only SmolLM2
    """
    shapes = tuple(shape for shape in SHAPES if only.lower() in shape.name.lower())
    if not shapes:
        raise SetupError(f"--only {only}: choose from {'; '.join(shape.name for shape in SHAPES)}")
    notes = Console(stderr=True, highlight=False)
    try:
        bench = ProductBench(threads=threads, rounds=rounds)
    except NativeUnavailable as error:
        raise SetupError(f"the native kernels cannot run here: {error}") from error
    results: list[ProductResult] = []
    try:
        with torch.inference_mode():
            for result in bench.run(shapes, _rows(rows)):
                notes.print(f"{result.shape}, {result.rows} rows: {_ratios(result.faster_than_bf16)}")
                results.append(result)
    finally:  # an interrupted run shows what it brought
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(results)).decode())
        elif results:
            _show(results, bench, threads)


def _show(results: list[ProductResult], bench: ProductBench, threads: int) -> None:
    title = (
        f"class {bench.kernels.features} on {processor_name()}, {threads} thread(s): how many times as fast "
        "as bf16; and bf16's as torch's"
    )
    table = Table(title=title)
    for column in ("shape", "rows", "bf16 us", *KINDS[1:], "bf16 : torch"):
        table.add_column(column, justify="left" if column == "shape" else "right", no_wrap=True)
    for r in results:
        ratios = [*(r.faster_than_bf16[kind] for kind in KINDS[1:]), r.faster_than_torch["bf16"]]
        table.add_row(
            r.shape, str(r.rows), f"{r.bf16_seconds * 1e6:.0f}", *(f"{ratio:.2f}" for ratio in ratios)
        )
    new_console().print(table)


def _rows(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise SetupError(f"--rows {text}: give whole numbers above 0, with commas between")
    return found


def _ratios(by_kind: dict[str, float]) -> str:
    return ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in by_kind.items())
