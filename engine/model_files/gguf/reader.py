"""The header of a GGUF file: metadata and where the tensors are. No torch here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import SetupError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT, _ALIGNMENT_MAX = 32, 1 << 20
_TENSORS_MAX, _ENTRIES_MAX = 1 << 17, 1 << 16
_ITEMS_MAX = 1 << 23
"""Most items of all arrays together: a tokenizer has three or four for each of its tokens and merges."""
_HEADER_BYTES_MAX = 256 * 2**20
_NAME_BYTES_MAX = 1 << 16
_WINDOW_BYTES = 1 << 18
"""Bytes of a list of texts that are read at once. A vocabulary has a hundred thousand texts, which took 0.3 s
to read one by one, in each process that reads the file."""
_LENGTH = struct.Struct("<Q")
_DIMENSIONS_MAX = 4
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}
"""Name, values per block and bytes per block, by type number."""


class GgufTensor(msgspec.Struct, frozen=True):
    file: Path
    type: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch; the file has them the other way round."""
    start: int
    """Offset in the file."""
    end: int

    @property
    def is_float(self) -> bool:
        return self.type in ("F32", "F16", "BF16")


class GgufHeader(msgspec.Struct, frozen=True):
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a file, or of all parts if the file is the first of several.

    Raises SetupError if a file is unreadable, truncated, damaged, or of an unknown version or type.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    name = _SPLIT.fullmatch(path.name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise SetupError(f"{path} is one of {count} parts: name the first, …-00001-of-{count:05}.gguf")
    tensors = dict(first.tensors)
    files = [path]
    for number in range(2, count + 1):
        files.append(path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf"))
        tensors |= _read_file(files[-1]).tensors
    return GgufHeader(tuple(files), first.metadata, tensors)


def _read_file(path: Path) -> GgufHeader:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise SetupError(f"{path} is no regular file")
        with path.open("rb") as file:
            return _Cursor(path, file).header()
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error


class _Cursor:
    """Reads on from the file's beginning. It does not map the file, since whoever reads a map of a file that
    becomes shorter dies."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path, self._file, self._at = path, file, 0
        self._size = os.fstat(file.fileno()).st_size
        self._item_count = 0

    def header(self) -> GgufHeader:
        if self._size < len(MAGIC) or self._take(4) != MAGIC:
            raise SetupError(f"{self._path} is not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise SetupError(f"{self._path} is GGUF version {version}; supported are 2 and 3, little endian")
        tensor_count, entry_count = self._count(_TENSORS_MAX), self._count(_ENTRIES_MAX)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string(bytes_max=_NAME_BYTES_MAX)
            if key in metadata:
                raise SetupError(f"{self._path} is damaged: {key:.200} is there twice")
            metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _ALIGNMENT_MAX:
            raise SetupError(f"{self._path}: general.alignment is {alignment!r:.100}")
        data_start = -(-self._at // alignment) * alignment
        tensors = {
            name: self._tensor(name, shape, kind, data_start + offset) for name, shape, kind, offset in infos
        }
        if len(tensors) < len(infos):
            raise SetupError(f"{self._path} is damaged: it has two tensors of one name")
        self._check_apart(tensors)
        return GgufHeader((self._path,), metadata, tensors)

    def _check_apart(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if tensor.start < end:
                raise SetupError(f"{self._path} is damaged: {name:.200} overlaps another tensor")
            end = tensor.end

    def _take(self, size: int) -> bytes:
        self._at += size
        if self._at > _HEADER_BYTES_MAX:
            raise SetupError(f"{self._path} is damaged: its header has more than {_HEADER_BYTES_MAX} bytes")
        content = self._file.read(size) if self._at <= self._size else b""
        if len(content) < size:
            raise SetupError(f"{self._path} is truncated or damaged: its header ends too early")
        return content

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return value

    def _count(self, most: int) -> int:
        value: int = self._scalar("<Q")
        if value > most:
            raise SetupError(f"{self._path} is damaged: it counts {value} entries")
        return value

    def _string(self, *, bytes_max: int = _HEADER_BYTES_MAX) -> str:
        length: int = self._scalar("<Q")
        if length > bytes_max:
            raise SetupError(f"{self._path} is truncated or damaged: a text of {length} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise SetupError(f"{self._path} is damaged: metadata of type {kind}")
            return self._scalar(_SCALARS[kind])
        item_kind: int = self._scalar("<I")
        count = self._count(_ITEMS_MAX - self._item_count)
        self._item_count += count
        if item_kind in _SCALARS:
            layout = f"<{count}{_SCALARS[item_kind][1:]}"
            return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
        if item_kind != _STRING:
            raise SetupError(f"{self._path}: arrays of type {item_kind} are not supported")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        texts: list[str] = []
        while len(texts) < count:
            window = self._file.read(_WINDOW_BYTES)
            used = _append_texts(window, texts, count)
            self._file.seek(self._at)
            self._take(used)
            if not used:  # longer than the window, or damaged, which is said there
                texts.append(self._string())
        return texts

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(bytes_max=_NAME_BYTES_MAX)
        dimension_count: int = self._scalar("<I")
        if not 1 <= dimension_count <= _DIMENSIONS_MAX:
            raise SetupError(f"{self._path}: tensor {name:.200} has {dimension_count} dimensions")
        shape = tuple(int(self._scalar("<Q")) for _ in range(dimension_count))
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        known = GGML_TYPES.get(kind)
        if known is None:
            names = ", ".join(label for label, *_ in GGML_TYPES.values())
            raise SetupError(f"{self._path}: {name:.200} has ggml type {kind}; supported are {names}")
        label, per_block, block_bytes = known
        if shape[-1] % per_block:
            raise SetupError(f"{self._path}: {name:.200} has rows of {shape[-1]}, no multiple of {per_block}")
        end = start + math.prod(shape) // per_block * block_bytes
        if end > self._size:
            raise SetupError(
                f"{self._path} is truncated: {name:.200} ends at byte {end} of {self._size}; download it anew"
            )
        return GgufTensor(self._path, label, shape, start, end)


def _append_texts(window: bytes, texts: list[str], count: int) -> int:
    """Append the texts that lie whole in `window` until there are `count`. Returns the bytes that they
    take."""
    at, size = 0, len(window)
    while len(texts) < count and at + _LENGTH.size <= size:
        (length,) = _LENGTH.unpack_from(window, at)
        end = at + _LENGTH.size + length
        if end > size:
            break
        texts.append(window[at + _LENGTH.size : end].decode("utf-8", errors="replace"))
        at = end
    return at
