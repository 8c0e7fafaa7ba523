"""Sources of a model's matrices: a plain checkpoint, a quantised one, or one that is quantised as it is read.

Tensors show which modules of a quantised checkpoint are quantised, so lists of modules that are not
(`ignore`, `modules_to_not_convert`) need no reading.
"""

from pathlib import Path

import torch
from torch import Tensor

from baton.config import ModelConfig
from baton.core.errors import SetupError
from engine.kernels.weights import DenseMatrix, IntMatrix, Matrix
from engine.loading.checkpoint import Checkpoint
from engine.loading.gguf_checkpoint import GgufCheckpoint, GgufSource
from engine.model_files.gguf.folder import weight_files_of
from engine.model_files.quant_scheme import QuantScheme
from engine.models.linear import MatrixSource
from engine.quant.round import round_fp8, round_int4, round_int8
from engine.quant.unpack import unpack

KEPT_MODULES = frozenset({"gate", "router", "shared_expert_gate", "kv_b_proj"})
"""Never rounded: routers decide discretely and are small; `kv_b_proj` is taken apart at load (MLA)."""


def open_checkpoint(folder: Path) -> Checkpoint | GgufCheckpoint:
    """Raises SetupError: files missing, truncated or malformed."""
    return Checkpoint(folder) if weight_files_of(folder) is None else GgufCheckpoint(folder)


def open_source(
    checkpoint: Checkpoint | GgufCheckpoint,
    scheme: QuantScheme | None,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> MatrixSource:
    """`model` is consistent with `scheme`, see `quant.scheme.check_quantization`. What a GGUF file has as
    integers stays so whatever `model.quantization` says."""
    if isinstance(checkpoint, GgufCheckpoint):
        blocks = GgufSource(checkpoint, dtype=dtype, device=device)
        return blocks if model.quantization == "none" else RoundedSource(blocks, model.quantization)
    if scheme is not None:
        return QuantizedSource(checkpoint, scheme, dtype=dtype, device=device)
    plain = PlainSource(checkpoint, dtype=dtype, device=device)
    return plain if model.quantization == "none" else RoundedSource(plain, model.quantization)


class PlainSource:
    """A checkpoint of floating-point numbers. Implements `MatrixSource`, as the others here do."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def has(self, name: str) -> bool:
        return name in self._checkpoint.names or f"{name}.weight" in self._checkpoint.names

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._checkpoint.tensor(name, shape, dtype=dtype or self.dtype, device=self.device)

    def stored(self, name: str, *shape: int) -> Tensor:
        found = self._checkpoint.raw(name, device=self.device)
        if found is None or found.shape != shape:
            has = "is not there" if found is None else f"has shape {list(found.shape)}"
            raise SetupError(f"{self._checkpoint.folder}: {name} {has}; expected is {list(shape)}")
        return found

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix:
        weight = self.tensor(f"{name}.weight", out_size, in_size)
        return DenseMatrix(weight, self.tensor(f"{name}.bias", out_size) if bias else None)

    def loaded(self, name: str, matrix: DenseMatrix) -> Matrix:
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

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix:
        if self._checkpoint.is_float(f"{name}.weight"):
            return super().matrix(name, out_size, in_size, bias=bias)

        def raw(suffix: str) -> Tensor | None:
            return self._checkpoint.raw(f"{name}.{suffix}", device=self.device)

        found = unpack(self._scheme, raw, name=name, out_size=out_size, in_size=in_size)
        if not bias:
            return found
        values = self.tensor(f"{name}.bias", out_size)
        if isinstance(found, IntMatrix):
            f = found
            return IntMatrix(f.bits, f.values, f.scales, f.zeros, f.group_size, f.order, values)
        return type(found)(found.values, found.scales, found.block, values)


class RoundedSource:
    """Another source, whose matrices are rounded when they are read: one is held dense at a time.

    int8: all matrices, the head included, per output channel. int4: in groups of inputs, the head in
    int8 (its errors go straight into the logits, and llama.cpp's 4-bit files keep it finer too). fp8: per
    output channel, the head as it is. Embedding, norms, biases and routers stay as they are.
    """

    def __init__(self, inner: MatrixSource, kind: str) -> None:
        """kind: int8, int4 or fp8."""
        self._inner, self._kind = inner, kind
        self.dtype, self.device = inner.dtype, inner.device

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._inner.tensor(name, *shape, dtype=dtype)

    def stored(self, name: str, *shape: int) -> Tensor:
        return self._inner.stored(name, *shape)

    def matrix(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Matrix:
        return self._rounded(name, self._inner.matrix(name, out_size, in_size, bias=bias))

    def loaded(self, name: str, matrix: DenseMatrix) -> Matrix:
        return self._rounded(name, self._inner.loaded(name, matrix))

    def _rounded(self, name: str, matrix: Matrix) -> Matrix:
        if not isinstance(matrix, DenseMatrix):
            return matrix
        module = name.rpartition(".")[2]
        if module in KEPT_MODULES:
            return matrix
        if self._kind == "fp8":
            return matrix if module == "lm_head" else round_fp8(matrix)
        if self._kind == "int4" and module != "lm_head":
            return round_int4(matrix)
        return round_int8(matrix)
