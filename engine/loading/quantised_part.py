"""Parts of the modules of quantised checkpoints.

Cut between groups, the tensors of a module are again those of a module: `quant.unpack` reads a part as it
reads the whole.
"""

from collections.abc import Callable

from torch import Tensor

from baton.core.errors import SetupError
from engine.loading.parts import Cuts
from engine.model_files.division import Places
from engine.model_files.quant_scheme import QuantScheme

_GROUP_OF_INPUT = ("g_idx", "weight_g_idx")
_BLOCK_SCALES = ("weight_scale_inv", "weight_scale")


class QuantisedPart:
    """Implements `engine.quant.unpack.RawTensors` for some rows or columns of a module."""

    def __init__(
        self,
        scheme: QuantScheme,
        shape: Callable[[str], tuple[int, ...] | None],
        read: Callable[[str, Cuts], Tensor | None],
        *,
        name: str,
        whole: tuple[int, int],
        rows: Places | None,
        columns: range | None,
    ) -> None:
        """shape, read: of the module's tensors, by suffix. whole: the module's outputs and inputs."""
        self._scheme, self._shape, self._read, self._name = scheme, shape, read, name
        self._whole = whole
        self._rows, self._columns = rows, columns

    def __call__(self, suffix: str) -> Tensor | None:
        shape = self._shape(suffix)
        if shape is None:
            return None
        if suffix in _GROUP_OF_INPUT:
            return self._group_of_input(suffix)
        out_size, in_size = self._whole
        columns = None if self._columns is None else (self._columns,)
        sides = [(out_size, self._rows), (in_size, columns)]
        if self._scheme.format in ("gptq", "awq"):
            sides.reverse()
        cuts = [
            self._stored_places(suffix, stored, total, places)
            for stored, (total, places) in zip(shape, sides, strict=False)
        ]
        return self._read(suffix, cuts)

    def _stored_places(self, suffix: str, stored: int, total: int, places: Places | None) -> Places | None:
        """Places along one dimension of a tensor that has `stored` entries for `total` outputs or inputs."""
        if places is None or stored <= 1:
            return None
        per = -(-total // stored)
        if self._scheme.fp8_block and suffix in _BLOCK_SCALES:
            per = self._scheme.fp8_block
        found: list[range] = []
        for one in places:
            if one.start % per or (one.stop % per and one.stop != total):
                raise SetupError(
                    f"{self._name}.{suffix} cannot be divided: {one.start} to {one.stop} of {total}, which "
                    f"one rank would hold, are not whole groups of {per}; choose a smaller tensor size"
                )
            found.append(range(one.start // per, -(-one.stop // per)))
        return tuple(found)

    def _group_of_input(self, suffix: str) -> Tensor | None:
        """Group of each input; None where they are in order, which needs no telling."""
        found = self._read(suffix, ())
        if found is None or self._columns is None:
            return found
        if bool((found[1:] < found[:-1]).any()):
            raise SetupError(
                f"{self._name}: its inputs are ordered by activation (act-order, desc_act), so groups do not "
                "stay whole when inputs are divided: take a checkpoint without it, or tp1"
            )
        return None
