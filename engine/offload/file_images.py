"""Images of streamed layers in a file, which a thread reads ahead of use.

The file has no name, so it is gone with the process however that ends, and nobody can shorten it. It is read
past the page cache unless the machine has room for all of it there: steps read it from end to end again and
again, and a cache that is smaller keeps just what is not wanted next. It is not mapped, since a page that
cannot be read would end the process or hold it for ever; reads are errors, with a deadline.
"""

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.movable import MovableWeights
from engine.model_files.offload_setting import BUFFERS
from engine.offload.images import OffloadFailed
from engine.offload.order import Read

PIECE_BYTES = 8 * 2**20
CLOSE_S = 1.0
"""The longest time that `close` waits for a read under way."""

ReadAt = Callable[[int, memoryview, int], int]
"""(file, memory, offset) -> bytes that were read. Raises OSError."""


def read_at(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)


class FileImages:
    """Implements `engine.offload.images.LayerImages`."""

    def __init__(
        self, folder: Path, *, deadline_s: float, is_cached: bool = False, read: ReadAt = read_at
    ) -> None:
        """deadline_s: for one image to arrive. is_cached: the page cache holds the file. Raises SetupError:
        the folder cannot be used."""
        self._file, is_direct = _open(folder, is_direct=not is_cached)
        self._deadline_s, self._read_at = deadline_s, read
        self._extents: list[tuple[int, int]] = []
        """Offset and size of each image."""
        self._buffers: list[mmap.mmap] = []
        self._staging = mmap.mmap(-1, mmap.PAGESIZE)
        self._orders: SimpleQueue[Read | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._arrived = [-1] * BUFFERS
        """Number of the read whose image each buffer has."""
        self._failure = ""
        self._reader: threading.Thread | None = None
        self.byte_count = self.bytes_read = 0
        self.waited_s = 0.0
        self._folder = folder
        self.place = f"a file in {folder}, {'read past' if is_direct else 'held in'} the page cache"

    def keep(self, weights: MovableWeights) -> None:
        size = weights.byte_count
        if len(self._staging) < size:
            self._staging = _memory(size)
        image = _tensor(self._staging, size)
        weights.copy_to(image)
        try:
            view = memoryview(self._staging)[:size]
            done = 0
            while done < size:
                done += os.pwritev(self._file, [view[done : done + PIECE_BYTES]], self.byte_count + done)
        except OSError as error:
            raise SetupError(
                f"cannot write {size / 2**20:,.0f} MiB of weights to {self._folder} (model.offload_folder), "
                f"after {self.byte_count / 2**20:,.0f} MiB: {error.strerror}"
            ) from error
        weights.place(image)
        self._extents.append((self.byte_count, size))
        self.byte_count += size

    def start(self) -> Tensor:
        size = max(size for _, size in self._extents)
        self._buffers = [self._staging, _memory(size)]
        self._reader = threading.Thread(target=self._run, name="offload", daemon=True)
        self._reader.start()
        return _tensor(self._buffers[0], size)

    def begin(self, read: Read) -> None:
        self._orders.put(read)

    def wait(self, read: Read) -> Tensor:
        size = self._extents[read.layer][1]
        began_s = time.monotonic()
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._failure or self._arrived[read.buffer] == read.number, self._deadline_s
            )
            failure = self._failure
        self.waited_s += time.monotonic() - began_s
        if not is_there:
            failure = f"reading {size / 2**20:,.0f} MiB has not ended in {self._deadline_s:g} s"
        if failure:
            raise OffloadFailed(f"streamed layer {read.layer} of {self.place}: {failure}")
        return _tensor(self._buffers[read.buffer], size)

    def used(self, buffer: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self._orders.put(None)
        if self._reader is None:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            return
        self._reader.join(CLOSE_S)  # one that hangs is left behind, and closes the file if it ever ends

    def _run(self) -> None:
        try:
            while (read := self._orders.get()) is not None:
                self._fill(read)
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            with self._changed:
                self._failure = f"cannot be read: {reason}"
                self._changed.notify_all()
        finally:
            os.close(self._file)

    def _fill(self, read: Read) -> None:
        offset, size = self._extents[read.layer]
        view = memoryview(self._buffers[read.buffer])[:size]
        done = 0
        while done < size:
            count = self._read_at(self._file, view[done : done + PIECE_BYTES], offset + done)
            if count <= 0:
                raise OSError(f"the file ends at byte {offset + done} of {self.byte_count}")
            done += count
        with self._changed:
            self.bytes_read += size
            self._arrived[read.buffer] = read.number
            self._changed.notify_all()


def _open(folder: Path, *, is_direct: bool) -> tuple[int, bool]:
    """A new file without a name, and whether it is read past the page cache. Only the last part of the
    folder's path may be missing: a path with a typing error would lead to another disk."""
    try:
        folder.mkdir(exist_ok=True)
        file = _unnamed(folder)
    except OSError as error:
        raise SetupError(
            f"cannot keep streamed layers in {folder}: {error.strerror} (set model.offload_folder)"
        ) from error
    if is_direct:
        # Some file systems, such as one in memory, know no other way than the page cache.
        with contextlib.suppress(OSError):
            direct = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            os.close(file)
            return direct, True
    return file, False


def _unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        file, name = tempfile.mkstemp(prefix="offload-", dir=folder)
        os.unlink(name)
        return file


def _memory(size: int) -> mmap.mmap:
    """Memory that begins at a page, as reads past the page cache want it."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise SetupError(f"not enough memory for {size / 2**20:,.0f} MiB of a streamed layer") from error
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _tensor(memory: mmap.mmap, size: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)
