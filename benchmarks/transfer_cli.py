"""`baton bench transfer`."""

from typing import Annotated

import typer

from benchmarks.transfer import run


def transfer(
    block_bytes: Annotated[int, typer.Option(min=1, help="Bytes per block.")] = 524_288,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per round.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to measure.")] = 5.0,
) -> None:
    """Compare reads between two processes with raw NIXL and memcpy, in one run.

    Example: baton bench transfer --block-bytes 524288 --blocks 512
    """
    print(run(block_bytes=block_bytes, block_count=blocks, seconds=seconds))
