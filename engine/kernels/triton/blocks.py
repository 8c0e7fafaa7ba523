"""Copies of whole blocks: one launch for any number of them, 16 bytes per thread and access.

The other side may be page-locked host memory, which the device reads and writes through the bus: blocks go
to and from a host pool without a staging copy on the device.
"""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    from_ptr, to_ptr, from_ids_ptr, to_ids_ptr, row_words, HAS_FROM_IDS: tl.constexpr,
    HAS_TO_IDS: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Row ids[i] (or i) of one array of rows to row ids[i] (or i) of another; WORDS words per program."""
    i = tl.program_id(0)
    source = tl.load(from_ids_ptr + i).to(tl.int64) if HAS_FROM_IDS else i.to(tl.int64)
    target = tl.load(to_ids_ptr + i).to(tl.int64) if HAS_TO_IDS else i.to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = word < row_words
    words = tl.load(from_ptr + source * row_words + word, mask=mask)
    tl.store(to_ptr + target * row_words + word, words, mask=mask)


def independent_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut (source, destination) pairs into runs whose copies may happen at once, so that doing the runs
    one after another is the same as doing the pairs one after another."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written or destination in read:
            yield run
            run, read, written = [], set(), set()
        run.append((source, destination))
        read.add(source)
        written.add(destination)
    if run:
        yield run
