"""`baton bench kernels`."""

from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.config import EngineConfig
from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.kernels import LLAMA_8B, KernelBench, KernelShape

SHAPES = {"82m": KernelShape(), "8b": LLAMA_8B}


def kernels(
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, cuda:1 …")] = "cpu",
    implementation: Annotated[
        str, typer.Option(help="Kernels to measure: auto, torch, native or triton.")
    ] = "auto",
    shape: Annotated[
        str, typer.Option(help="Model whose shapes are used: 82m or 8b; empty: by device.")
    ] = "",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare each kernel with its limit, which is measured in the same run.

    The limit is memory reads or copies, or the rate of bf16 matrix products by torch.

    Example: baton bench kernels --threads 2
    """
    notes = Console(stderr=True, highlight=False)
    name = shape or ("8b" if device.startswith("cuda") else "82m")
    if name not in SHAPES:
        raise SetupError(f"--shape {shape}: choose one of {', '.join(SHAPES)}")
    torch.set_num_threads(threads)
    engine = _engine(implementation, threads)
    with torch.inference_mode():
        bench = KernelBench(SHAPES[name], device=device, engine=engine, rounds=rounds)
        results = list(bench.run(notes.print))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
        return
    read, copy, matmul = bench.limits.read / 1e9, bench.limits.copy / 1e9, bench.limits.matmul / 1e9
    title = (
        f"{bench.title}, {device}, {threads} thread(s): reads {read:.0f} GB/s, "
        f"copies {copy:.0f} GB/s, matmul {matmul:.0f} GFLOP/s\n"
        "ratio: seconds at the limit to seconds taken; torch: torch's seconds to ours"
    )
    table = Table(title=title)
    for column in ("kernel", "case", "us", "limit", "ratio", "torch"):
        is_text = column in ("kernel", "case", "limit")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for r in results:
        beside = "" if r.torch_ratio is None else f"{r.torch_ratio:.2f}"
        table.add_row(r.kernel, r.case, f"{r.seconds * 1e6:.0f}", r.limit, f"{r.ratio:.2f}", beside)
    new_console().print(table)


def _engine(implementation: str, threads: int) -> EngineConfig:
    try:
        return EngineConfig.model_validate({"kernels": implementation, "threads": threads})
    except ValueError:
        raise SetupError(f"--implementation {implementation}: choose auto, torch, native or triton") from None
