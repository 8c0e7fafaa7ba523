"""Weights of a checkpoint: safetensors files, memory-mapped.

On the CPU a tensor whose dtype is already right is a view of the mapped file: what is only read from
it to be packed for the kernels costs no further copy.
"""

import hashlib
import mmap
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.loading.mapped_file import map_file, refuse_if_shorter, sample_ranges, sampled
from engine.loading.parts import Cuts, take
from engine.model_files.safetensors_files import TensorEntry, read_header, weight_files

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_PACKED_DTYPES: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Dtypes that only quantised checkpoints have."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Mapped:
    mapping: mmap.mmap
    content: Tensor
    """The whole file, uint8."""
    header: bytes


class Checkpoint:
    """The tensors of a model folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError: files missing, truncated or malformed."""
        self.folder = folder
        self._files: dict[Path, _Mapped] = {}
        self._entries: dict[str, TensorEntry] = {}
        for file in weight_files(folder):
            header, entries = read_header(file)
            self._files[file] = _mapped(file, header)
            refuse_if_shorter(file, max((one.end for one in entries.values()), default=0))
            self._entries.update(entries)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        cuts: Cuts = (),
    ) -> Tensor:
        """A view of the mapped file if `dtype`, `device` and `cuts` allow it, else a copy. `shape` is that of
        the whole tensor; only what `cuts` leave is read.

        Raises SetupError: no such tensor, another shape, or a dtype that is not a float's.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise SetupError(f"{self.folder}: the checkpoint has no tensor {name}")
        if entry.shape != shape:
            raise SetupError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        stored = _DTYPES.get(entry.dtype)
        if stored is None:
            raise SetupError(f"{entry.file}: {name} is {entry.dtype}; supported are {', '.join(_DTYPES)}")
        return take(self._view(entry, stored), cuts).to(device=device, dtype=dtype)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a stored tensor; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def is_float(self, name: str) -> bool:
        """True if there is such a tensor and `tensor` can return it."""
        entry = self._entries.get(name)
        return entry is not None and entry.dtype in _DTYPES

    def raw(self, name: str, *, device: torch.device, cuts: Cuts = ()) -> Tensor | None:
        """The tensor (what `cuts` leave of it) as it is stored, whatever its shape; None if there is none.
        Raises SetupError for an unknown dtype."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        stored = (_DTYPES | _PACKED_DTYPES).get(entry.dtype)
        if stored is None:
            raise SetupError(f"{entry.file}: {name} is {entry.dtype}, which is not supported")
        return take(self._view(entry, stored), cuts).to(device)

    def _view(self, entry: TensorEntry, stored: torch.dtype) -> Tensor:
        mapped = self._files[entry.file]
        refuse_if_shorter(entry.file, len(mapped.mapping))
        raw = mapped.content[entry.start : entry.end]
        if raw.data_ptr() % stored.itemsize:
            raw = raw.clone()  # the format does not promise alignment, torch demands it
        return raw.view(stored).view(entry.shape)

    def layer_bytes(self) -> dict[int, int]:
        """Bytes of each layer's tensors."""
        return bytes_by_layer(((name, one.end - one.start) for name, one in self._entries.items()), _LAYER)

    def release(self) -> None:
        """Let go of the memory of what was read so far. What is used again is read again, from the
        system's cache or the file; tensors that are views stay valid."""
        for mapped in self._files.values():
            mapped.mapping.madvise(mmap.MADV_DONTNEED)

    def digest(self) -> str:
        """64 hex digits that two processes with the same checkpoint agree on.

        Covers every header (names, shapes, dtypes), every file size, small tensors whole, and pages
        spread evenly over large ones: reading a 100 GB checkpoint whole would take minutes. Blind to a
        change confined to a few rows of a large matrix.
        """
        digest = hashlib.sha256()
        for file in sorted(self._files, key=lambda path: path.name):
            mapped = self._files[file]
            digest.update(len(mapped.content).to_bytes(8, "little"))
            digest.update(mapped.header)
        tensors = (self._entries[name] for name in sorted(self._entries))
        for content in sampled(
            (one.file, *ends) for one in tensors for ends in sample_ranges(one.start, one.end)
        ):
            digest.update(content)
        return digest.hexdigest()


def bytes_by_layer(sizes: Iterable[tuple[str, int]], layer: re.Pattern[str]) -> dict[int, int]:
    """sizes: names of tensors and their bytes. layer: finds a layer's number in a name."""
    found: dict[int, int] = {}
    for name, size in sizes:
        if number := layer.search(name):
            index = int(number[1])
            found[index] = found.get(index, 0) + size
    return found


def _mapped(file: Path, header: bytes) -> _Mapped:
    mapping = map_file(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing here writes
        return _Mapped(mapping, torch.frombuffer(mapping, dtype=torch.uint8), header)
