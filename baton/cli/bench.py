"""`baton bench`: parts measured against their own limits, all in one run."""

from typing import Annotated

import typer


def bench(
    part: Annotated[str, typer.Argument(help="What to measure: transfer.")] = "transfer",
    block_kib: Annotated[int, typer.Option(min=1, help="Size of a block.")] = 512,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of one read.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure.")] = 5.0,
) -> None:
    """KV reads as a worker makes them, against NIXL alone and against memcpy, between two processes."""
    if part != "transfer":
        raise typer.BadParameter(f"{part}: there is only transfer")
    from kv_transfer.bench import run

    print(run(block_bytes=block_kib * 1024, block_count=blocks, seconds=seconds))
