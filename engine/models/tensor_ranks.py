"""The arithmetic of a forward pass that tensor ranks share (Megatron-LM, arXiv 1909.08053 section 3).

Heads and MLPs are divided by their outputs, the matrices behind them by their inputs, so that a layer needs
two sums over the ranks. Each rank holds a part of the vocabulary. After a sum all ranks hold the same bits.
"""

from typing import Any

from torch import Tensor

from engine.kernels.interface import Kernels
from engine.parallel.group import Group


class TensorRanks:
    def __init__(self, group: Group, vocabulary: tuple[range, ...]) -> None:
        """vocabulary: token ids of each rank, in order."""
        self._group = group
        self._tokens = vocabulary[group.rank]
        self._sizes = tuple(map(len, vocabulary))

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def residual(self, hidden: Tensor) -> Tensor | None:
        """The summand that goes into this rank's part of a sum: one rank adds it."""
        return hidden if self._group.rank == 0 else None

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the memory of this one."""
        return self._group.all_reduce_(part)

    def meet(self, like: Tensor) -> None:
        """Return when all ranks have come here. `like`: a tensor on the ranks' devices, of a type that they
        sum."""
        self._group.all_reduce_(like.new_zeros(1))

    def embed(self, kernels: Kernels[Any, Any, Any], tokens: Tensor, table: Tensor) -> Tensor:
        """tokens int64 [T], table [this rank's part of the vocabulary, hidden] -> [T, hidden]."""
        own = tokens - self._tokens.start
        is_foreign = (own < 0) | (own >= len(self._tokens))
        rows = kernels.embed(own.masked_fill(is_foreign, 0), table)
        return self.total(rows.masked_fill_(is_foreign[:, None], 0))

    def logits(self, part: Tensor) -> Tensor:
        """float32 [R, this rank's part of the vocabulary] -> [R, vocab] on rank 0, which samples. The
        others keep their part."""
        whole = self._group.gather(part.contiguous(), 1, sizes=self._sizes)
        return part if whole is None else whole
