"""`baton bench policies`"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.eviction.measure import EvictionReport, measure
from benchmarks.eviction.table import NAMES


def policies(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSON lines.")],
    sizes: Annotated[str, typer.Option(help="Blocks the pool holds.")] = "1000,3000,10000,30000,50000,100000",
    names: Annotated[str, typer.Option("--policies", help="Which to compare.")] = ",".join(NAMES),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Prefix hits by all blocks of a trace in one pool, for each eviction policy and size, beside Belady.

    Example: baton bench policies mooncake_conversation.jsonl --sizes 3000,10000 --policies lru,serving
    """
    notes = Console(stderr=True, highlight=False)
    report = measure(trace, _sizes(sizes), _policies(names), progress=notes.print)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _show(report)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise SetupError(f"--sizes: whole numbers with commas, not {text!r}") from None
    if min(sizes) < 1:
        raise SetupError(f"--sizes: at least 1 block, not {min(sizes)}")
    return sizes


def _policies(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",")]
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise SetupError(f"--policies: some of {','.join(NAMES)}, not {','.join(unknown)}")
    return chosen


def _show(report: EvictionReport) -> None:
    table = Table(
        title=f"{report.trace}: {report.requests} requests, {report.blocks_asked} blocks, "
        f"{report.blocks} distinct\nprefix hits by all blocks; (share of the gap from LRU to Belady closed)"
    )
    table.add_column("blocks", justify="right")
    for result in report.sizes[0].policies:
        table.add_column(result.policy, justify="right")
    table.add_column("Belady", justify="right")
    for size in report.sizes:
        cells = [
            f"{r.hit_ratio:.4f}"
            + ("" if r.gap_closed is None or r.policy == "lru" else f" ({r.gap_closed:.2f})")
            for r in size.policies
        ]
        table.add_row(str(size.capacity_blocks), *cells, f"{size.best_possible:.4f}")
    new_console(highlight=False).print(table)
