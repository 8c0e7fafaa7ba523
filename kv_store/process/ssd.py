"""Reads and writes of SSD files on threads. Calls for one slot run in the order in which they were asked
for."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.config import StoreConfig
from baton.core.errors import SetupError
from kv_store.arena import Arena, slot_bytes_for
from kv_store.node import events as e
from kv_store.ssd.block_file import BlockFile
from kv_store.ssd.errors import CorruptBlock, DiskError, DiskFull
from kv_store.ssd.folder import files_in, own_folder
from kv_store.ssd.folder_lock import FolderLock
from kv_store.ssd.layout import PAGE_BYTES, slot_disk_bytes
from kv_transfer.peers import Spawn

log = logging.getLogger(__name__)

SIZE_CLASSES_MAX = 16
"""The core's limit of size classes: for the first page of each file, room is kept within the configured disk
space."""

Work = Callable[[], e.IoDone | None]
Slot = tuple[int, int]
"""A slot by (size class, slot of its SSD file)."""


def within_disk(config: StoreConfig) -> StoreConfig:
    """The configuration as the core shall count: without the first pages of the files."""
    room = max(0, config.ssd_bytes - SIZE_CLASSES_MAX * PAGE_BYTES)
    return config.model_copy(update={"ssd_bytes": room})


class Disks:
    """All SSD files of a node. `arena` gives the memory of a size class that was opened."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        arena: Callable[[int], Arena],
        post: Callable[[e.NodeEvent], None],
        spawn: Spawn,
    ) -> None:
        """`config` is what `within_disk` returned."""
        self._config, self._arena, self._post, self._spawn = config, arena, post, spawn
        self._threads = ThreadPoolExecutor(config.ssd_threads, thread_name_prefix="ssd")
        self._files: dict[int, BlockFile] = {}
        self._lock: FolderLock | None = None
        self._opening: set[int] = set()
        self._opens: set[asyncio.Task[None]] = set()
        """Files that are being read."""
        self._last: dict[Slot, asyncio.Task[None]] = {}
        """The latest call for each slot, under way or waiting."""

    def notes(self) -> tuple[str, ...]:
        return tuple(note for file in self._files.values() for note in file.notes)

    def open_found(self) -> None:
        """Open the files that an earlier life left, beside the loop. Each is reported as it is read.

        The folder is ours from here on. If it cannot be used, this tier is lost only, and each size class
        reports it.
        """
        if self._config.ssd_dir:
            with contextlib.suppress(SetupError):
                self._lock = own_folder(self._config.ssd_dir)
        found: list[tuple[int, int, int]] = []
        for size_class in sorted(files_in(self._config.ssd_dir) if self._config.ssd_dir else ()):
            slot_bytes = slot_bytes_for(size_class)
            if slot_count := self._config.ssd_bytes // slot_disk_bytes(slot_bytes):
                self._opening.add(size_class)
                found.append((size_class, slot_bytes, slot_count))
        self._spawn_open(self._open_all(found))

    async def _open_all(self, found: list[tuple[int, int, int]]) -> None:
        for size_class, slot_bytes, slot_count in found:
            await self._open(size_class, slot_bytes, slot_count)

    def open(self, opened: e.OpenSizeClass) -> None:
        """Open a file beside the loop. It is answered by SizeClassOpened, unless there is nothing to open or
        that is under way."""
        if opened.ssd_slot_count and opened.size_class not in self._opening:
            self._opening.add(opened.size_class)
            self._spawn_open(self._open(opened.size_class, opened.slot_bytes, opened.ssd_slot_count))

    async def until_open(self) -> None:
        """Wait until the content of all files that are being read was reported."""
        if self._opens:
            await asyncio.wait(self._opens)

    def _spawn_open(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(coroutine)
        self._opens.add(task)
        task.add_done_callback(self._opens.discard)

    async def _open(self, size_class: int, slot_bytes: int, slot_count: int) -> None:
        def work() -> tuple[BlockFile, list[e.Recovered]]:
            return BlockFile.open(
                self._config.ssd_dir,
                block_bytes=size_class,
                slot_bytes=slot_bytes,
                slot_count=slot_count,
                io=self._config.ssd_io,
            )

        began_s = time.monotonic()
        try:
            file, recovered = await asyncio.to_thread(work)
        except (SetupError, OSError) as error:
            log.error("blocks of %d bytes have no SSD tier: %s", size_class, error)
            self._post(e.SizeClassOpened(size_class, error=str(error)))
            return
        self._files[size_class] = file
        took_s = time.monotonic() - began_s
        log.info("%s: %d blocks found in %.2f s", file.path, len(recovered), took_s)
        for note in file.notes:
            log.info("%s", note)
        self._post(e.SizeClassOpened(size_class, tuple(recovered)))

    # --- operations -------------------------------------------------------------------------------

    def read(self, action: e.ReadSsd) -> None:
        file, view = self._files[action.size_class], self._arena(action.size_class).view(action.slot)

        def work() -> e.IoDone:
            checksum = file.read(action.ssd_slot, view, action.block_hash)
            return e.IoDone(action.op_id, checksum=checksum)

        self._start((action.size_class, action.ssd_slot), action.op_id, work)

    def write(self, action: e.WriteSsd) -> None:
        file, view = self._files[action.size_class], self._arena(action.size_class).view(action.slot)

        def work() -> e.IoDone:
            checksum = file.write(action.ssd_slot, view, action.facts, action.checksum)
            return e.IoDone(action.op_id, checksum=checksum)

        self._start((action.size_class, action.ssd_slot), action.op_id, work)

    def forget(self, action: e.ForgetSsd) -> None:
        file = self._files.get(action.size_class)
        slot = (action.size_class, action.ssd_slot)
        if file is None:
            return
        if slot in self._last:
            self._start(slot, None, lambda: file.forget(action.ssd_slot))
        else:
            file.forget(action.ssd_slot)

    def _start(self, slot: Slot, op_id: int | None, work: Work) -> None:
        task = self._spawn(self._run(self._last.get(slot), op_id, work))
        self._last[slot] = task
        task.add_done_callback(lambda done: self._ended(slot, done))

    def _ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        if self._last.get(slot) is task:
            del self._last[slot]

    async def _run(self, before: asyncio.Task[None] | None, op_id: int | None, work: Work) -> None:
        if before is not None:
            await asyncio.wait({before})
        done = await asyncio.get_running_loop().run_in_executor(self._threads, _perform, op_id, work)
        if done is not None:
            self._post(done)

    async def flush(self) -> None:
        """Wait until what was to be forgotten by now is gone from the disk, whatever happens next. Raises
        DiskError."""
        if self._last:
            await asyncio.wait(set(self._last.values()))
        for file in list(self._files.values()):
            await asyncio.to_thread(file.flush)

    async def close(self) -> None:
        """Close the files, after the tasks have ended. It waits for threads, and for what is to be
        forgotten."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            try:
                file.close()
            except DiskError as error:
                log.error("%s: %s", file.path, error)
        if self._lock is not None:
            self._lock.release()


def _perform(op_id: int | None, work: Work) -> e.IoDone | None:
    began_s = time.monotonic()
    try:
        done = work()
    except DiskError as error:
        if op_id is None:
            return None
        is_corrupt, is_full = isinstance(error, CorruptBlock), isinstance(error, DiskFull)
        log.warning("SSD tier: %s%s", error, "; the block is dropped" if is_corrupt else "")
        return e.IoDone(op_id, str(error), is_corrupt, is_full, time.monotonic() - began_s)
    if done is None:
        return None
    return e.IoDone(done.op_id, checksum=done.checksum, seconds=time.monotonic() - began_s)
