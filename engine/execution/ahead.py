"""Steps that are begun before the tokens of the step before have left the device.

A GPU computes while the host prepares: if the host waited for a step's tokens before it launched the next
step, the device would idle meanwhile. So the tokens that a step samples stay on the device, where the next
step takes them from; copies of them are on their way to the host, for whoever finishes the step.

All of it happens on one stream, in order, so a step reads the KV that the step before wrote.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baton.core.ids import SeqKey
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan
from engine.devices import to_device
from engine.execution.step_batch import AheadStep, StepBatch
from engine.sampling.state import needs_state


class StepsAhead:
    """The tokens of the newest step on the device, and how many steps are begun and not finished. One thread
    begins steps, and another may finish them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[SeqKey, int] = {}
        """Place of each sequence's token in `_newest`."""
        self._newest = torch.empty(0, dtype=torch.int64, device=device)
        self._changed = threading.Condition()
        self._open, self._is_closed = 0, False

    # --- one thread begins ---

    def takes(self, plan: StepPlan) -> bool:
        """Return whether the tokens follow from logits and draws alone, so that nothing on the host has
        to know them before the next step."""
        return bool(plan.items) and all(_is_plain(item) for item in plan.items)

    def has(self, key: SeqKey) -> bool:
        """Return whether the sequence's newest token is on the device."""
        return key in self._rows

    def inputs(self, batch: StepBatch, items: Sequence[StepItem]) -> tuple[Tensor, Tensor]:
        """The batch's tokens and wanted rows, int64, on the device. Tokens that nobody but the device knows
        are put in there."""
        places: list[int] = []
        sources: list[int] = []
        start = 0
        for index in batch.layout.order:
            item = items[index]
            if item.tokens[0] == PENDING_TOKEN and item.key in self._rows:
                places.append(start)
                sources.append(self._rows[item.key])
            start += len(item.tokens)
        numbers = torch.tensor([*batch.tokens, *batch.rows, *places, *sources], dtype=torch.int64)
        counts = (len(batch.tokens), len(batch.rows), len(places), len(sources))
        tokens, rows, into, of = to_device(numbers, self._device).split(counts)
        if places:
            tokens = tokens.index_copy(0, into, self._newest[of])
        return tokens, rows

    def begun(self, keys: Sequence[SeqKey], chosen: Tensor | None) -> AheadStep:
        """Note a step whose kernels are all launched. chosen: int64 [n], on the device, one token for each of
        `keys`; None: nothing is sampled."""
        self._rows = {key: row for row, key in enumerate(keys)}
        self._newest = self._newest[:0] if chosen is None else chosen
        is_cuda = self._device.type == "cuda"
        host = torch.empty(len(keys), dtype=torch.int64, pin_memory=is_cuda)
        host.copy_(self._newest, non_blocking=True)
        done: Any = None
        if is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self._open += 1
        return AheadStep(host, done)

    def catch_up(self) -> None:
        """Wait until all steps are finished: the next one needs what the host knows then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._is_closed)
        self._rows, self._newest = {}, self._newest[:0]

    # --- one thread finishes ---

    def finished(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody will finish what is begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _is_plain(item: StepItem) -> bool:
    params = item.sampling
    return (
        not item.draft_count
        and not item.want_drafts
        and not item.adapter
        and not item.wants_embedding
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not needs_state(params)
    )
