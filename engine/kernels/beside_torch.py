"""The native matrix product beside torch's, of the same numbers, on the machine at hand.

Torch is a yardstick and no candidate: its results for a row change with the rows beside it, and ours may not
(docs/decisions/0059). Where it is much faster the worker says so.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from baton.core.messages import INFO_NOTE
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kernels.weights import DenseMatrix

ROWS, SIZE = 512, 768
"""A chunk of a prompt times a square matrix: 0.6 GFLOP."""
ROUNDS = 5
BUDGET_S = 0.25
"""Seconds of all rounds but the first, which cannot be cut short."""
SLOW_BELOW = 0.8
CLEARLY_FASTER = 2
"""Where ours is so many times as fast, one round is enough, unless torch's time is so short that other work
may be the cause. Its products in bfloat16 take 60 ms and more without instructions for it."""
SECOND_LOOKS = 2
"""Measurements more, at most, before a worker warns."""


def notes_beside_torch(kernels: Kernels[Any, Any, Any]) -> Iterator[str]:
    """One line for `Member.notes`; nothing for kernels other than the native ones."""
    if isinstance(kernels, NativeKernels):
        share = share_of_torch(kernels)
        for _ in range(SECOND_LOOKS):  # other work on the machine falls on one of the two at times
            if share < SLOW_BELOW:
                share = max(share, share_of_torch(kernels))
        yield note_of(kernels.features, share)


def note_of(features: str, share: float) -> str:
    """share: torch's seconds by ours."""
    told = f"a product of {ROWS} rows by kernels of class {features} is {share:.2f} times as fast as torch's"
    if share >= SLOW_BELOW:
        return INFO_NOTE + told
    return (
        f"{told}: prompts would take less time with engine.kernels=torch, whose answers may change with the "
        "requests beside them"
    )


def share_of_torch(kernels: NativeKernels, *, now: Callable[[], float] = time.perf_counter) -> float:
    """Torch's seconds divided by ours, the best of some rounds in turn, each on its own threads."""
    weight = torch.randn(SIZE, SIZE).to(kernels.dtype)
    x = torch.randn(ROWS, SIZE).to(kernels.dtype)
    matrix = kernels.pack(DenseMatrix(weight))
    calls: tuple[Callable[[], object], ...] = (
        lambda: kernels.linear(x, matrix),
        lambda: F.linear(x, weight),
    )
    best = [float("inf")] * len(calls)
    for call in calls:
        call()  # pays for what is made on first use
    ends_s = now() + BUDGET_S
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            begun = now()
            call()
            best[number] = min(best[number], now() - begun)
        if now() > ends_s or best[1] > max(CLEARLY_FASTER * best[0], BUDGET_S / ROUNDS):
            break
    ours_s, torch_s = best
    return torch_s / ours_s if ours_s > 0 else 1.0
