"""Sources of a model's matrices: a plain checkpoint, a quantised one, or one that is quantised as it is read.

Tensors show which modules of a quantised checkpoint are quantised, so lists of modules that are not
(`ignore`, `modules_to_not_convert`) need no reading.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from baton.config import ModelConfig
from baton.core.errors import SetupError
from engine.kernels.weights import DenseMatrix, IntMatrix, Matrix
from engine.loading.checkpoint import Checkpoint
from engine.loading.gguf_checkpoint import GgufCheckpoint, GgufSource
from engine.loading.parts import Cuts, PartSource
from engine.loading.quantised_part import QuantisedPart
from engine.loading.rounded_source import RoundedSource
from engine.loading.stacked_experts import StackedExpertsSource
from engine.model_files.division import Places
from engine.model_files.gguf.folder import weight_files_of
from engine.model_files.quant_scheme import QuantScheme
from engine.model_files.spec import ModelSpec
from engine.quant.unpack import unpack


def open_checkpoint(folder: Path) -> Checkpoint | GgufCheckpoint:
    """Raises SetupError: files missing, truncated or malformed."""
    return Checkpoint(folder) if weight_files_of(folder) is None else GgufCheckpoint(folder)


def open_source(
    checkpoint: Checkpoint | GgufCheckpoint,
    spec: ModelSpec,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PartSource:
    """spec: of the whole model. `model` is consistent with its quantisation, see
    `quant_scheme.check_quantization`. What a GGUF file has as integers stays so whatever `model.quantization`
    says."""
    if isinstance(checkpoint, GgufCheckpoint):
        source: PartSource = GgufSource(checkpoint, dtype=dtype, device=device)
    else:
        source = plain = PlainSource(checkpoint, dtype=dtype, device=device)
        if spec.quantization is not None:
            source = plain = QuantizedSource(checkpoint, spec.quantization, dtype=dtype, device=device)
        if spec.moe is not None and spec.moe.expert_names == "gpt_oss":
            source = StackedExpertsSource(plain, spec.moe)
    return source if model.quantization == "none" else RoundedSource(source, model.quantization)


class PlainSource:
    """A checkpoint of floating-point numbers. Implements `PartSource`, as the others here do."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def has(self, name: str) -> bool:
        return name in self._checkpoint.names or f"{name}.weight" in self._checkpoint.names

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, cuts: Cuts = ()) -> Tensor:
        dtype = dtype or self.dtype
        return self._checkpoint.tensor(name, shape, dtype=dtype, device=self.device, cuts=cuts)

    def stored(self, name: str, *shape: int, cuts: Cuts = ()) -> Tensor:
        """A tensor as the checkpoint has it, whatever its dtype. Raises SetupError, as the others."""
        has = self._checkpoint.shape(name)
        found = self._checkpoint.raw(name, device=self.device, cuts=cuts) if has == shape else None
        if found is None:
            said = "is not there" if has is None else f"has shape {list(has)}"
            raise SetupError(f"{self._checkpoint.folder}: {name} {said}; expected is {list(shape)}")
        return found

    def matrix(
        self,
        name: str,
        out_size: int,
        in_size: int,
        *,
        bias: bool = False,
        rows: Places | None = None,
        columns: range | None = None,
    ) -> Matrix:
        cuts = (rows, None if columns is None else (columns,))
        weight = self.tensor(f"{name}.weight", out_size, in_size, cuts=cuts)
        return DenseMatrix(weight, self.tensor(f"{name}.bias", out_size, cuts=(rows,)) if bias else None)

    def tied(
        self, name: str, matrix: DenseMatrix, *, out_size: int = 0, rows: Places | None = None
    ) -> Matrix:
        return matrix


class QuantizedSource(PlainSource):
    """A checkpoint with quantised modules among plain ones."""

    def __init__(
        self, checkpoint: Checkpoint, scheme: QuantScheme, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(checkpoint, dtype=dtype, device=device)
        self._scheme = scheme

    def has(self, name: str) -> bool:
        stored = (f"{name}.{suffix}" for suffix in ("qweight", "weight_packed"))
        return super().has(name) or any(tensor in self._checkpoint.names for tensor in stored)

    def matrix(
        self,
        name: str,
        out_size: int,
        in_size: int,
        *,
        bias: bool = False,
        rows: Places | None = None,
        columns: range | None = None,
    ) -> Matrix:
        if self._checkpoint.is_float(f"{name}.weight"):
            return super().matrix(name, out_size, in_size, bias=bias, rows=rows, columns=columns)
        part = QuantisedPart(
            self._scheme,
            lambda suffix: self._checkpoint.shape(f"{name}.{suffix}"),
            lambda suffix, cuts: self._checkpoint.raw(f"{name}.{suffix}", device=self.device, cuts=cuts),
            name=name,
            whole=(out_size, in_size),
            rows=rows,
            columns=columns,
        )
        part_out = out_size if rows is None else sum(map(len, rows))
        part_in = in_size if columns is None else len(columns)
        found = unpack(self._scheme, part, name=name, out_size=part_out, in_size=part_in)
        if not bias:
            return found
        values = self.tensor(f"{name}.bias", out_size, cuts=(rows,))
        if isinstance(found, IntMatrix):
            return replace(found, bias=values)
        return type(found)(found.values, found.scales, found.block, values)
