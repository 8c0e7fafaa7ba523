"""Counter-based randomness: the number for generated token i of a sequence with seed s is a hash of
(s, i). Nothing else enters, so a sequence continues identically in another batch, on another worker
and after a crash, and a draft token that was right is the one that would have been drawn."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit numbers."""
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


def uniforms(pairs: Iterable[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, index): output number `index` of a SplitMix64 generator whose
    state is the hashed seed. Seeds count modulo 2**64."""
    table = np.array([(seed & _MASK, index + 1) for seed, index in pairs], dtype=np.uint64).reshape(-1, 2)
    state = _mix(table[:, 0] + _GOLDEN)
    bits = _mix(state + table[:, 1] * _GOLDEN) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def uniform(seed: int, index: int) -> float:
    return float(uniforms([(seed, index)])[0])
