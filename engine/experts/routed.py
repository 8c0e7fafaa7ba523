"""The experts of one process of a worker that are elsewhere, as its forward pass calls them."""

from dataclasses import dataclass

from torch import Tensor

from engine.experts.caller import Dispatch, ExpertCaller
from engine.model_files.division import Division


@dataclass(frozen=True, slots=True)
class _Sent:
    dispatch: Dispatch
    row_count: int


class RemoteExperts:
    """Implements `engine.models.linear.RoutedExperts`. Tensor ranks have the same rows: each sends its part,
    and the sum over the ranks, which follows anyway, puts the parts together."""

    def __init__(
        self, caller: ExpertCaller, *, layers_before: int = 0, tensor_rank: int = 0, tensor_size: int = 1
    ) -> None:
        """layers_before: layers with experts in the pipeline stages before this one."""
        self._caller, self._layers_before = caller, layers_before
        self.overlaps = caller.overlaps
        self._own = slice(tensor_rank, None, tensor_size)
        self._is_divided = tensor_size > 1

    @classmethod
    def of(cls, caller: ExpertCaller, division: Division) -> "RemoteExperts":
        """division: the part of the model that the process has."""
        moe = division.spec.moe
        assert moe is not None
        before = sum(layer < division.stage.first_layer for layer in moe.layers)
        return cls(caller, layers_before=before, tensor_rank=division.rank, tensor_size=division.tensor)

    def begin(self, layer: int, x: Tensor, chosen: Tensor) -> _Sent:
        own, its = (x[self._own], chosen[self._own]) if self._is_divided else (x, chosen)
        return _Sent(self._caller.begin(self._layers_before + layer, own, its), len(x))

    def finish(self, sent: _Sent, weights: Tensor) -> Tensor:
        if not self._is_divided:
            return self._caller.finish(sent.dispatch, weights)
        own = self._caller.finish(sent.dispatch, weights[self._own].contiguous())
        out = own.new_zeros((sent.row_count, own.shape[1]))
        out[self._own] = own
        return out
