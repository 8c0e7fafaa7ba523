"""Calls that are made again for other numbers of rows than those they were recorded with.

What a step calls depends on its sizes (tokens, sequences, rows that are asked for) in its integers only, and
these are sums of multiples of the sizes: rows, elements, strides. So a few recordings of different sizes tell
every integer for all sizes. One more, in which all sizes differ, has to come out as the others predict.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.native.recording import (
    CALL_WORDS,
    WORD_BYTES,
    NotRecordable,
    RecordableLibrary,
    Tape,
    replay_function,
)

Words = npt.NDArray[np.int64]


class SizedReplay:
    """One thread at a time."""

    def __init__(
        self, native: RecordableLibrary, tapes: Sequence[Tape], sizes: Sequence[tuple[int, ...]]
    ) -> None:
        """tapes[1 + i] differs from the first in size i only; one more or several differ in all.
        Raises NotRecordable: the calls depend on the sizes in another way."""
        first = tapes[0]
        if any((tape.names, tape.places) != (first.names, first.places) for tape in tapes):
            raise NotRecordable("which kernels a step calls depends on its size")
        words = [tape.words() for tape in tapes]
        factors = [
            _factor(words[0], words[1 + i], sizes[1 + i][i] - sizes[0][i]) for i in range(len(sizes[0]))
        ]
        constant = words[0] - sum(
            (factor * size for factor, size in zip(factors, sizes[0], strict=True)), np.zeros_like(words[0])
        )
        for found, of in zip(words, sizes, strict=True):
            predicted = constant + sum(factor * size for factor, size in zip(factors, of, strict=True))
            if not np.array_equal(predicted, found):
                raise NotRecordable("a kernel's arguments are no multiples of the step's sizes")
        self._names, self._kept = first.names, first.kept
        self._memory = constant
        self._address = self._memory.ctypes.data
        self._place_structures(first)
        self._changing = np.flatnonzero(np.any(np.stack(factors) != 0, axis=0))
        self._constant = constant[self._changing]
        self._factors = [factor[self._changing] for factor in factors]
        self._function = replay_function(native)
        self._sizes: tuple[int, ...] | None = None
        """Sizes that the calls have now."""

    def _place_structures(self, tape: Tape) -> None:
        start = CALL_WORDS * len(tape)
        for place, size in tape.places:
            self._memory[place] = self._address + WORD_BYTES * start
            start += size

    def __len__(self) -> int:
        return len(self._names)

    @property
    def memory_bytes(self) -> int:
        return self._memory.nbytes

    def __call__(self, *sizes: int) -> None:
        """Make all calls. Raises NotRecordable: one of them failed."""
        if sizes != self._sizes:
            now = self._constant.copy()
            for factor, size in zip(self._factors, sizes, strict=True):
                now += factor * size
            self._memory[self._changing] = now
            self._sizes = sizes
        failed = self._function(self._address, len(self))
        if failed >= 0:
            raise NotRecordable(f"{self._names[failed]} failed in a replay")


def _factor(first: Words, other: Words, difference: int) -> Words:
    factor, rest = np.divmod(other - first, difference)
    if rest.any():
        raise NotRecordable("a kernel's arguments are no multiples of the step's sizes")
    return factor
