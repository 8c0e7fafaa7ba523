"""`baton bench hedging`"""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.files.terminal import new_console
from benchmarks.hedging import FAULTS, HedgingResult, measure
from simulator.fleet.setup import PoolSizes

LOADS = (0.6, 0.9)


def hedging(
    prefill: Annotated[int, typer.Option(min=2, help="Prefill workers.")] = 6,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 3,
    share: Annotated[float, typer.Option(min=0.001, max=0.5, help="`router.hedge_share` under test.")] = 0.02,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 5,
    requests: Annotated[int, typer.Option(min=100, help="Requests of each run.")] = 3000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Backup attempts on the fleet simulator: their gain under faults of prefill workers, and their cost.

    Example: baton bench hedging --seeds 5 --requests 3000
    """
    notes = Console(stderr=True, highlight=False)
    result = measure(
        pools=PoolSizes(prefill, decode),
        faults=FAULTS,
        loads=LOADS,
        hedge_share=share,
        seeds=seeds,
        requests=requests,
        jobs=jobs,
        progress=notes.print,
    )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        _show(result)


def _show(result: HedgingResult) -> None:
    table = Table(title=f"{result.cluster}; capacity {result.capacity_per_s:.2f} requests/s")
    for name in (
        "fault",
        "load",
        "share",
        "TTFT p50",
        "p99",
        "p99.9",
        "goodput",
        "computed",
        "hedged",
        "won",
    ):
        table.add_column(name, justify="left" if name == "fault" else "right")
    table.add_column("seeds with a lower p99", justify="right")
    for one in result.summaries:
        table.add_row(
            one.fault,
            f"{one.load:.0%}",
            f"{one.hedge_share:g}",
            f"{one.ttft_p50_s:.3f}",
            f"{one.ttft_p99_s:.3f}",
            f"{one.ttft_p999_s:.3f}",
            f"{one.goodput_share:.2%}",
            f"{one.computed_share:.4f}",
            f"{one.hedged_share:.2%}",
            f"{one.won_share:.0%}",
            f"{one.better} of {one.seeds}",
        )
    new_console(highlight=False).print(table)
