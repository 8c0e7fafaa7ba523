"""The safetensors files of a model folder, without their tensors' values. No torch here: a damaged
checkpoint is found before any process that computes is started."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from baton.core.errors import SetupError
from engine.model_files.json_files import parse_json_object, read_json_object

_HEADER_BYTES_MAX = 32 * 2**20
"""Enough for 250,000 tensors. The format allows three times as much, which would take gigabytes to parse."""
_INDEX_BYTES_MAX = 64 * 2**20
_FILES_MAX = 4096
_DIMENSIONS_MAX = 8
_DTYPE_BYTES: dict[str, int] = {
    dtype: size
    for size, dtypes in (
        (8, ("F64", "I64", "U64")),
        (4, ("F32", "I32", "U32")),
        (2, ("F16", "BF16", "I16", "U16")),
        (1, ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")),
    )
    for dtype in dtypes
}


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
    content = read_json_object(index, bytes_max=_INDEX_BYTES_MAX, what="a safetensors index")
    if content is None:
        raise SetupError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    places: object = content.get("weight_map")
    names = (
        set(map(str, cast(dict[str, object], places).values())) if isinstance(places, dict) else set[str]()
    )
    if not 0 < len(names) <= _FILES_MAX:
        raise SetupError(f"{index} is not a safetensors index: its weight_map names {len(names)} files")
    files = [folder / name for name in sorted(names)]
    for file in files:
        # Names come from a downloaded file: they must not lead out of the folder. Links of the folder itself
        # may, since that is how the cache of the Hugging Face hub keeps files.
        if file.parent != folder or not _is_file(file):
            raise SetupError(f"{index} names {file.name:.200}, which is not in {folder}")
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than a name may be, or with a null character
        return False


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
        content = parse_json_object(header, str(file), what="a safetensors file", may_repeat=False)
        content.pop("__metadata__", None)
        entries = {name: _entry(file, value, 8 + header_bytes) for name, value in content.items()}
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{file} is not a safetensors file: {error!r:.300}") from error
    _check_places(file, entries, 8 + header_bytes, size)
    return header, entries


def _check_places(file: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The format has the tensors one behind the other, without holes, up to the end of the file."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise SetupError(
                f"{file} is damaged: {name:.200} begins at byte {entry.start}, where {at} was expected; "
                "download it anew"
            )
        at = entry.end
    if at > size:
        raise SetupError(f"{file} is truncated: its header tells of {at} bytes, the file has {size}")
    if at < size:
        raise SetupError(f"{file} is damaged: its header tells of {at} bytes, the file has {size}")


def _entry(file: Path, value: dict[str, Any], data_start: int) -> TensorEntry:
    start, end = _whole(value["data_offsets"], "data_offsets")
    shape = _whole(value["shape"], "shape")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"dtype {dtype!r:.100} of {len(shape)} dimensions")
    item_bytes = _DTYPE_BYTES.get(dtype)
    if end < start:
        raise ValueError(f"offsets {start}, {end}, shape {shape}")
    if item_bytes is not None and math.prod(shape) * item_bytes != end - start:
        raise ValueError(f"shape {shape} of {dtype} is not {end - start} bytes")
    return TensorEntry(file, dtype, shape, data_start + start, data_start + end)


def _whole(values: object, name: str) -> tuple[int, ...]:
    found = cast(list[object], values) if isinstance(values, list) else [None]
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**63 for one in found):
        raise ValueError(f"{name} {values!r:.100}")
    return tuple(cast(list[int], found))
