"""`baton bench store`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks import store as copies
from benchmarks.store import MeasuredRate
from benchmarks.store_disk import DiskBench, DiskPlan, DiskRates

IO_CHOICES = ("auto", "direct", "buffered")


def store(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder on the disk to measure; without it, only copies are measured."),
    ] = None,
    block_bytes: Annotated[int, typer.Option(min=4, max=2**30)] = 524_288,
    blocks: Annotated[int, typer.Option(min=8, max=2**20, help="Blocks in pool and arena.")] = 512,
    disk_blocks: Annotated[int, typer.Option(min=8, max=2**24, help="Blocks in the SSD file.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    copy_threads: Annotated[int, typer.Option(min=1, max=64)] = 1,
    disk_threads: Annotated[int, typer.Option(min=1, max=64, help="Threads, as in store.ssd_threads.")] = 4,
    io: Annotated[str, typer.Option(help="IO mode, as in store.ssd_io: auto, direct or buffered.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the store's paths with their limits.

    Copies between pool and arena are compared with memcpy of the same bytes, the SSD tier with fio (or with
    bare threads if fio is not installed).

    Example: baton bench store --dir /var/tmp --block-bytes 524288
    """
    notes = Console(stderr=True, highlight=False)
    if io not in IO_CHOICES:
        raise SetupError(f"--io {io}: choose one of {', '.join(IO_CHOICES)}")
    rates, arena_notes = copies.bench_copies(
        block_bytes, blocks, rounds=rounds, threads=copy_threads, progress=notes.print
    )
    disk: DiskRates | None = None
    if directory is not None:
        plan = DiskPlan(directory, block_bytes, disk_blocks, disk_threads, rounds, io)
        bench = DiskBench(plan, notes.print)
        try:
            disk = bench.run()
        finally:
            bench.close()
    for note in (*arena_notes, *(disk.notes if disk else ())):
        notes.print(note)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(block_bytes, rates, disk))).decode())
    else:
        _print_table(block_bytes, rates, disk)


def _as_json(block_bytes: int, rates: list[MeasuredRate], disk: DiskRates | None) -> dict[str, object]:
    listed = [{**asdict(rate), "ratio": rate.ratio} for rate in (*rates, *(disk.rates if disk else ()))]
    scan = {} if disk is None else {"recovery_labels_per_s": disk.labels_per_s}
    return {"block_bytes": block_bytes, "rates": listed, **scan}


def _print_table(block_bytes: int, rates: list[MeasuredRate], disk: DiskRates | None) -> None:
    table = Table(title=f"Store, blocks of {block_bytes} bytes, medians of one run")
    table.add_column("path", no_wrap=True)
    table.add_column("GB/s", justify="right")
    table.add_column("compared with", no_wrap=True)
    table.add_column("GB/s", justify="right")
    table.add_column("ratio", justify="right")
    for rate in (*rates, *(disk.rates if disk else ())):
        beside = (f"{rate.beside_bytes_per_s / 1e9:.2f}", f"{rate.ratio:.2f}") if rate.beside else ("", "")
        table.add_row(rate.path, f"{rate.bytes_per_s / 1e9:.2f}", rate.beside, *beside)
    out = new_console()
    out.print(table)
    if disk is not None:
        out.print(f"recovery: {disk.labels_per_s:,.0f} slots/s", highlight=False)
