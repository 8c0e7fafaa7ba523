"""Repetition, presence and frequency penalties, and logit bias: a few numbers of each row change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


class TokenCounts:
    """Tokens that a sequence has, and how often each was generated (0: only in the prompt)."""

    def __init__(self, prompt: Iterable[int], generated: Sequence[int]) -> None:
        found, times = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        rest = np.setdiff1d(np.fromiter(prompt, dtype=np.int64), found)
        self._ids: Ids = np.concatenate((found, rest))
        self._counts: Numbers = np.concatenate((times, np.zeros(len(rest)))).astype(np.float32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place + 32)
                self._counts = np.resize(self._counts, 2 * place + 32)
            self._ids[place], self._counts[place] = token, 0
        self._counts[place] += 1

    def mark(self) -> int:
        return len(self._places)

    def reset(self, mark: int, added: Iterable[int]) -> None:
        """Take back what was added since the mark."""
        for token in added:
            self._counts[self._places[token]] -= 1
        while len(self._places) > mark:
            self._places.popitem()

    def view(self) -> tuple[Ids, Numbers]:
        """(ids, how often generated), each id once. Changes with the next `add`."""
        size = len(self._places)
        return self._ids[:size], self._counts[:size]


@dataclass(frozen=True, slots=True)
class RowCounts:
    """One row's tokens for `penalise`."""

    row: int
    params: SamplingParams
    ids: Ids
    counts: Numbers


def penalise(logits: Tensor, rows: Sequence[RowCounts]) -> None:
    """Repetition (arXiv 1909.05858): a logit of a token that occurred is divided by the penalty where
    positive, else multiplied with it. Then frequency times its count, and presence, are subtracted for
    tokens that were generated."""
    sizes = [len(r.ids) for r in rows]
    table = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (r.params for r in rows)],
        dtype=np.float32,
    )
    repetition, frequency, presence = np.repeat(table, sizes, axis=0).T
    counts = np.concatenate([r.counts for r in rows])
    less = frequency * counts + presence * (counts > 0)
    where = _where(logits, [r.row for r in rows], [r.ids for r in rows])
    factor = torch.from_numpy(repetition.copy()).to(logits.device)
    values = logits[where]
    values = torch.where(values > 0, values / factor, values * factor)
    logits[where] = values - torch.from_numpy(less).to(logits.device)


def add_bias(logits: Tensor, rows: Sequence[tuple[int, Ids, Numbers]]) -> None:
    """rows: (row, ids, what is added to each)."""
    where = _where(logits, [row for row, _, _ in rows], [ids for _, ids, _ in rows])
    values = torch.from_numpy(np.concatenate([numbers for _, _, numbers in rows])).to(logits.device)
    logits[where] = logits[where] + values


def _where(logits: Tensor, rows: Sequence[int], ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    row_of = np.repeat(np.array(rows, dtype=np.int64), [len(some) for some in ids])
    device = logits.device
    return torch.from_numpy(row_of).to(device), torch.from_numpy(np.concatenate(ids)).to(device)
