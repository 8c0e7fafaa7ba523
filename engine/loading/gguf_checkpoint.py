"""The weights of a GGUF file under Hugging Face's names, as integer matrices where they are integers."""

import hashlib
import mmap
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.weights import DenseMatrix, IntMatrix, Matrix
from engine.loading.checkpoint import bytes_by_layer
from engine.loading.gguf_blocks import Bytes, blocks_to_matrix, dequantize, is_exact
from engine.loading.mapped_file import map_file, refuse_if_shorter, sample_ranges, sampled
from engine.loading.parts import Cuts
from engine.model_files.division import Places
from engine.model_files.fields import Fields
from engine.model_files.gguf.folder import weight_files_of
from engine.model_files.gguf.names import GgufPlace, place_of
from engine.model_files.gguf.reader import GGML_TYPES, GgufTensor, read_gguf
from engine.model_files.json_files import read_json_object

_LAYER = re.compile(r"^blk\.(\d+)\.")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {name: (per_block, block_bytes) for name, per_block, block_bytes in GGML_TYPES.values()}


class GgufCheckpoint:
    def __init__(self, folder: Path) -> None:
        """folder: made by `unpack_gguf`. Raises SetupError: the file is gone or damaged."""
        files = weight_files_of(folder)
        assert files, folder
        self._header = read_gguf(files[0])
        self._mappings = {file: map_file(file) for file in self._header.files}
        self._content = {file: np.frombuffer(one, np.uint8) for file, one in self._mappings.items()}
        config = Fields(read_json_object(folder / "config.json") or {}, str(folder / "config.json"))
        self._heads = (config.integer("num_attention_heads"), config.integer("num_key_value_heads"))
        self._architecture = str(self._header.metadata["general.architecture"])

    def find(self, name: str) -> tuple[GgufPlace, GgufTensor] | None:
        """Find a tensor by its Hugging Face name."""
        place = place_of(name, self._architecture)
        tensor = None if place is None else self._header.tensors.get(place.name)
        return None if place is None or tensor is None else (place, tensor)

    def floats(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, rows: Places | None = None
    ) -> Tensor:
        """rows: along the first dimension of `shape`. Raises SetupError: no such tensor, or another shape."""
        place, tensor = self._found(name)
        found = (1, *tensor.shape) if place.change == "row" and len(tensor.shape) == 1 else tensor.shape
        if found != shape:
            raise SetupError(f"{tensor.file}: {place.name} is {list(found)}, expected is {list(shape)}")
        stored = self._rows(tensor, -1)
        if len(shape) == 1:
            values = _float_rows(stored, tensor).view(shape)
            wanted = self._wanted_rows(name, place, shape[0], rows)
            values = values if wanted is None else values[wanted]
        else:
            part = _selected(stored, self._wanted_rows(name, place, shape[0], rows))
            exact = torch.float32 if place.change == "minus_one" else dtype
            values = _float_rows(part, tensor, exact).view(-1, *shape[1:])
        return (values.float() - 1 if place.change == "minus_one" else values).to(dtype)

    def matrix(
        self,
        name: str,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        *,
        rows: Places | None = None,
        columns: range | None = None,
    ) -> Matrix:
        """`name` with ".weight". Raises SetupError, as `floats`, or if `columns` are not whole blocks."""
        place, tensor = self._found(name)
        if place.change == "row":
            return DenseMatrix(self.floats(name, (out_size, in_size), dtype))
        shape = tensor.shape[1:] if place.expert >= 0 else tensor.shape
        if shape != (out_size, in_size) or (place.expert >= 0 and place.expert >= tensor.shape[0]):
            raise SetupError(
                f"{tensor.file}: {place.name} is {list(tensor.shape)}, expected is {[out_size, in_size]}"
            )
        stored = self._rows(tensor, place.expert)
        if columns is not None:
            stored = stored[:, _block_bytes(place, tensor, columns)]
        part = _selected(stored, self._wanted_rows(name, place, out_size, rows))
        if tensor.is_float:
            return DenseMatrix(_float_rows(part, tensor).to(dtype))
        return blocks_to_matrix(part, tensor.type, dtype)

    def dense_types(self) -> list[str]:
        """Quantised types of matrices that are made dense when they are read."""
        tensors = self._header.tensors
        untied = {"token_embd.weight"} if "output.weight" in tensors else set[str]()
        matrices = [t for name, t in tensors.items() if len(t.shape) > 1 and name not in untied]
        return sorted({t.type for t in matrices if not t.is_float and not is_exact(t.type)})

    def layer_bytes(self) -> dict[int, int]:
        """Bytes of each layer's tensors."""
        tensors = self._header.tensors.items()
        return bytes_by_layer(((name, tensor.end - tensor.start) for name, tensor in tensors), _LAYER)

    def digest(self) -> str:
        """Digest of the weights, in the sense of `checkpoint.Checkpoint.digest`."""
        digest = hashlib.sha256()
        for name in sorted(self._header.tensors):
            tensor = self._header.tensors[name]
            digest.update(f"{name} {tensor.type} {tensor.shape}".encode())
            for content in sampled((tensor.file, *ends) for ends in sample_ranges(tensor.start, tensor.end)):
                digest.update(content)
        return digest.hexdigest()

    def release(self) -> None:
        """See `checkpoint.Checkpoint.release`."""
        for mapping in self._mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)

    def _found(self, name: str) -> tuple[GgufPlace, GgufTensor]:
        found = self.find(name)
        if found is None:
            raise SetupError(f"{self._header.files[0]} has no tensor for {name}")
        return found

    def _rows(self, tensor: GgufTensor, expert: int) -> Bytes:
        """uint8 [rows, bytes of a row]; expert: -1 for all of the tensor."""
        per_block, block_bytes = _BLOCKS[tensor.type]
        row_bytes = tensor.shape[-1] // per_block * block_bytes
        rows = self._bytes(tensor).reshape(-1, row_bytes)
        if expert < 0:
            return rows
        count = tensor.shape[-2]
        return rows[expert * count : (expert + 1) * count]

    def _bytes(self, tensor: GgufTensor) -> Bytes:
        content = self._content[tensor.file]
        refuse_if_shorter(tensor.file, len(content))
        if tensor.end > len(content):
            raise SetupError(f"{tensor.file} is truncated: it has {len(content)} of {tensor.end} bytes")
        return content[tensor.start : tensor.end]

    def _wanted_rows(
        self, name: str, place: GgufPlace, row_count: int, rows: Places | None
    ) -> npt.NDArray[np.int64] | slice | None:
        """Rows of the file in the order in which they are needed; None: all, as they are."""
        if place.change != "rope_rows":
            if rows is None:
                return None
            if len(rows) == 1:
                return slice(rows[0].start, rows[0].stop, rows[0].step)
            return np.concatenate([np.asarray(one, dtype=np.int64) for one in rows])
        heads = self._heads[0] if "q_proj" in name else self._heads[1]
        if row_count % (2 * heads):
            raise SetupError(
                f"{self._header.files[0]}: {place.name} has {row_count} rows, no multiple of {heads} heads"
            )
        # llama.cpp pairs neighbours where Hugging Face pairs the halves of a head, and its converter sorts
        # the rows of q and k accordingly.
        order = np.arange(row_count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return (
            order
            if rows is None
            else np.concatenate([order[one.start : one.stop : one.step] for one in rows])
        )


class GgufSource:
    """Implements `engine.loading.parts.PartSource`."""

    def __init__(self, checkpoint: GgufCheckpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def has(self, name: str) -> bool:
        find = self._checkpoint.find
        return find(name) is not None or find(f"{name}.weight") is not None

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, cuts: Cuts = ()) -> Tensor:
        rows, *others = cuts or (None,)
        assert not any(others), "only rows can be cut"
        return self._checkpoint.floats(name, shape, dtype or self.dtype, rows=rows).to(self.device)

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
        found = self._checkpoint.matrix(
            f"{name}.weight", out_size, in_size, self.dtype, rows=rows, columns=columns
        )
        values = self.tensor(f"{name}.bias", out_size, cuts=(rows,)) if bias else None
        return _placed(found, values, self.device)

    def tied(
        self, name: str, matrix: DenseMatrix, *, out_size: int = 0, rows: Places | None = None
    ) -> Matrix:
        """The table is read anew, to be as small as the file has it."""
        row_count, in_size = matrix.weight.shape
        found = self._checkpoint.matrix(
            "model.embed_tokens.weight", out_size or row_count, in_size, self.dtype, rows=rows
        )
        return matrix if isinstance(found, DenseMatrix) else _placed(found, None, self.device)


def _selected(stored: Bytes, rows: npt.NDArray[np.int64] | slice | None) -> Bytes:
    return stored if rows is None else stored[rows]


def _block_bytes(place: GgufPlace, tensor: GgufTensor, columns: range) -> slice:
    """Bytes of a row that hold some of its numbers."""
    per_block, block_bytes = _BLOCKS[tensor.type]
    if columns.start % per_block or columns.stop % per_block:
        raise SetupError(
            f"{tensor.file}: the {tensor.shape[-1]} inputs of {place.name} cannot be divided: "
            f"{columns.start} to {columns.stop}, which one rank would hold, are not whole {tensor.type} "
            f"blocks of {per_block}; choose a smaller tensor size, or a file of a type with smaller blocks"
        )
    return slice(columns.start // per_block * block_bytes, columns.stop // per_block * block_bytes)


def _float_rows(rows: Bytes, tensor: GgufTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` is that of a quantised tensor's numbers. Others keep theirs."""
    if tensor.is_float:
        return torch.from_numpy(np.array(rows)).view(_FLOATS[tensor.type])
    return dequantize(np.ascontiguousarray(rows), tensor.type, dtype)


def _placed(matrix: Matrix, bias: Tensor | None, device: torch.device) -> Matrix:
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.weight.to(device), bias)
    assert isinstance(matrix, IntMatrix)
    zeros = None if matrix.zeros is None else matrix.zeros.to(device)
    return IntMatrix(
        bits=matrix.bits,
        values=matrix.values.to(device),
        scales=matrix.scales.to(device),
        zeros=zeros,
        group_size=matrix.group_size,
        bias=bias,
    )
