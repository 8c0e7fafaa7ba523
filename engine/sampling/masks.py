"""Masks of tokens: a bit per token, in int32 words (bit i of word w is token 32 w + i), as xgrammar fills
them. No torch here.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]


def mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def mask_of(token_ids: Iterable[int], vocab: int) -> Mask:
    """Ids beyond the vocabulary are left out."""
    bits = np.zeros(mask_words(vocab) * 32, dtype=np.uint8)
    bits[[token for token in token_ids if 0 <= token < vocab]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
