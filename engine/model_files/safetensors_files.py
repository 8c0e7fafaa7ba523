"""The safetensors files of a model folder, without their tensors' values. No torch here: a damaged
checkpoint is found before any process that computes is started."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.core.errors import SetupError

_HEADER_BYTES_MAX = 100 * 2**20
"""The safetensors format's own limit."""
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    end: int


def check_weights(folder: Path) -> None:
    """Raises SetupError: files missing, truncated or malformed."""
    for file in weight_files(folder):
        read_header(file)


def weight_files(folder: Path) -> list[Path]:
    """The one weight file, or all files that the index names. Raises SetupError if a file is missing."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise SetupError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SetupError(f"{index} is not a safetensors index: {error!r}") from error
    files = [folder / str(name) for name in sorted(names)]
    for file in files:
        # Names come from a downloaded file: they must not lead out of the folder.
        if file.parent != folder or not file.is_file():
            raise SetupError(f"{index} names {file.name}, which is not in {folder}")
    return files


def read_header(file: Path) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header's bytes and the tensors it names: https://github.com/huggingface/safetensors#format

    Raises SetupError: unreadable, truncated or malformed.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _HEADER_BYTES_MAX):
                raise SetupError(f"{file} is truncated or is not a safetensors file")
            header = stream.read(header_bytes)
        content = cast(dict[str, Any], json.loads(header))
        content.pop("__metadata__", None)
        entries = {name: _entry(file, value, 8 + header_bytes) for name, value in content.items()}
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{file} is not a safetensors file: {error!r}") from error
    end = max((entry.end for entry in entries.values()), default=8 + header_bytes)
    if end > size:
        raise SetupError(f"{file} is truncated: its header tells of {end} bytes, the file has {size}")
    if end < size:
        raise SetupError(f"{file} is damaged: its header tells of {end} bytes, the file has {size}")
    return header, entries


def _entry(file: Path, value: dict[str, Any], data_start: int) -> TensorEntry:
    start, end = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(length) for length in value["shape"])
    dtype = str(value["dtype"])
    item_bytes = _DTYPE_BYTES.get(dtype)
    if start < 0 or end < start or any(length < 0 for length in shape):
        raise ValueError(f"offsets {start}, {end}, shape {shape}")
    if item_bytes is not None and math.prod(shape) * item_bytes != end - start:
        raise ValueError(f"shape {shape} of {dtype} is not {end - start} bytes")
    return TensorEntry(file, dtype, shape, data_start + start, data_start + end)
