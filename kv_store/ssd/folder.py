"""The folder of a node's files: `lock`, and one `blocks-<block bytes>.kv` per size class."""

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.core.errors import SetupError
from kv_store.ssd.choose_io import choose_io, supports_direct
from kv_store.ssd.device import Device, IoMode
from kv_store.ssd.folder_lock import FolderLock
from kv_store.ssd.layout import (
    FILE_ID_BYTES,
    PAGE_BYTES,
    VERSION,
    Title,
    decode_title,
    encode_title,
    file_bytes,
)

_NAME = re.compile(r"blocks-(\d+)\.kv")


@dataclass(frozen=True, slots=True)
class SizeClassFile:
    """An open file whose title was read, in a folder that is ours."""

    device: Device
    title: Title
    lock: FolderLock
    notes: tuple[str, ...]
    """What the operator should know."""

    def close(self) -> None:
        self.device.close()
        self.lock.release()


def file_path(directory: Path, block_bytes: int) -> Path:
    return directory / f"blocks-{block_bytes}.kv"


def files_in(directory: str | Path) -> dict[int, int]:
    """Files of earlier lives: their disk bytes by block size. They count towards what the node may use."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return {}
    matches = [(match, entry) for entry in entries if (match := _NAME.fullmatch(entry.name))]
    return {int(match[1]): entry.stat().st_blocks * 512 for match, entry in matches}


def own_folder(directory: str | Path) -> FolderLock:
    """Make the folder if it is not there, and lock it. Raises SetupError if it cannot be used, or another
    process uses it."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"store.ssd_dir: {directory}: {error.strerror}") from error
    return FolderLock(Path(directory))


def open_size_class_file(
    directory: Path,
    block_bytes: int,
    slot_bytes: int,
    slot_count: int,
    io: Literal["auto", "direct", "buffered"],
) -> SizeClassFile:
    """Open the file of a size class; make it if it is not there. Raises SetupError."""
    lock = own_folder(directory)
    try:
        return _open(lock, file_path(directory, block_bytes), block_bytes, slot_bytes, slot_count, io)
    except OSError as error:
        lock.release()
        raise SetupError(f"store.ssd_dir: {error.filename or directory}: {error.strerror}") from error
    except BaseException:
        lock.release()
        raise


def _open(
    lock: FolderLock,
    path: Path,
    block_bytes: int,
    slot_bytes: int,
    slot_count: int,
    io: Literal["auto", "direct", "buffered"],
) -> SizeClassFile:
    size = file_bytes(slot_bytes, slot_count)
    notes: list[str] = []
    if path.exists():
        title = _read_title(path)
        if (title.block_bytes, title.slot_bytes) != (block_bytes, slot_bytes):
            raise SetupError(
                f"{path} holds blocks of {title.block_bytes} bytes, not {block_bytes}: {_WAY_OUT}"
            )
    else:
        title = _create(path, block_bytes, slot_bytes)
    os.truncate(path, size)
    free = shutil.disk_usage(path.parent).free + path.stat().st_blocks * 512
    if free < size:
        notes.append(f"{path} may grow to {size} bytes, but the disk has room for {free} only")
    mode: IoMode
    if io == "auto":
        mode, note = choose_io(path.parent, slot_bytes)
        notes.append(note)
    else:
        mode = io
    if mode == "direct" and not supports_direct(path):
        mode = "buffered"
        notes.append(f"{path}: its file system has no direct IO: buffered")
    return SizeClassFile(Device(path, mode), title, lock, tuple(notes))


_WAY_OUT = "delete it or choose another store.ssd_dir"


def _read_title(path: Path) -> Title:
    with path.open("rb") as file:
        title = decode_title(file.read(PAGE_BYTES))
    if title is None:
        raise SetupError(f"{path} is not a file of a Baton store, or damaged: {_WAY_OUT}")
    if title.version != VERSION:
        raise SetupError(f"{path} was written in format {title.version}, not {VERSION}: {_WAY_OUT}")
    return title


def _private(path: str, flags: int) -> int:
    """Open a file for its owner alone: whoever reads the file reads all blocks."""
    return os.open(path, flags, 0o600)


def _create(path: Path, block_bytes: int, slot_bytes: int) -> Title:
    """Create a file. It gets its name only once its title is on the disk."""
    title = Title(secrets.token_bytes(FILE_ID_BYTES), block_bytes, slot_bytes)
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(draft, "wb", opener=_private) as file:
        file.write(encode_title(title))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return title
