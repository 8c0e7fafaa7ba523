"""Compares the SSD tier with `fio` on the same disk: same sizes, same depth, same flags, in turns.

If there is no fio, threads that only read and write take its place.
"""

import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import SetupError
from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from benchmarks.store import MeasuredRate, Progress
from kv_store.arena import Arena, slot_bytes_for
from kv_store.checksum import checksum
from kv_store.ssd.block_file import BlockFile, IoChoice
from kv_store.ssd.device import AlignedBuffers, Device, IoMode
from kv_store.ssd.layout import file_bytes, slot_disk_bytes

ARENA_SLOTS = 64
FIO_TIMEOUT_S = 300.0
NEW_FILE_ROUNDS_MAX = 3
_COMPARED_WITH = {"write": "write, new file", "randwrite": "write", "randread": "read"}
"""Maps fio's name of an operation to ours."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    directory: Path
    block_bytes: int
    block_count: int
    threads: int
    """Reads or writes in flight, ours and those that are compared."""
    rounds: int
    io: IoChoice


@dataclass(frozen=True, slots=True)
class DiskRates:
    rates: list[MeasuredRate]
    labels_per_s: float
    """Slots per second of the recovery scan."""
    notes: tuple[str, ...]


class DiskBench:
    """One block file and one plain file of the same size in a temporary folder, which `close` removes."""

    def __init__(self, plan: DiskPlan, progress: Progress) -> None:
        """Raises SetupError if the folder cannot be used or has no room."""
        self._plan, self._progress = plan, progress
        self._slot_bytes = slot_bytes_for(plan.block_bytes)
        self._folder = self._make_folder()
        self._arena = Arena.create(self._slot_bytes, ARENA_SLOTS, name="baton-bench")
        self._arena.reserve(0, ARENA_SLOTS)
        for slot in range(ARENA_SLOTS):
            self._arena.view(slot)[:] = os.urandom(self._slot_bytes)
        # The node writes with the checksum that the worker made.
        self._checksums = [
            checksum(self._arena.view(slot)[: plan.block_bytes]) for slot in range(ARENA_SLOTS)
        ]
        self._facts = [_facts(index) for index in range(plan.block_count)]
        self._buffers = AlignedBuffers()

    def run(self) -> DiskRates:
        """Run the bench. Raises SetupError, DiskError."""
        plan, samples = self._plan, _Samples()
        for at in range(min(plan.rounds, NEW_FILE_ROUNDS_MAX)):
            self._progress(f"SSD: {plan.block_count} blocks into a new file, round {at + 1}")
            self._new_file_round(samples)
        file = self._open(plan.io)[0]
        mode, order = file.io, list(range(plan.block_count))
        with closing(file):
            for at in range(plan.rounds):
                random.Random(at).shuffle(order)
                self._progress(f"SSD: writing and reading, {mode}, round {at + 1} of {plan.rounds}")
                samples.add("write", self._timed(order, lambda slot: self._write(file, slot)))
                self._compare(samples, "randwrite", mode)
                drop_cache(file.path)
                samples.add("read", self._timed(order, lambda slot: self._read(file, slot)))
                self._compare(samples, "randread", mode)
        return DiskRates(samples.rates(), self._labels_per_s(mode), file.notes)

    def _new_file_round(self, samples: "_Samples") -> None:
        for path in self._folder.iterdir():
            path.unlink()
        file = self._open(self._plan.io)[0]
        slots = list(range(self._plan.block_count))
        with closing(file):
            samples.add("write, new file", self._timed(slots, lambda slot: self._write(file, slot)))
            self._compare(samples, "write", file.io)

    def close(self) -> None:
        self._arena.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path:
        directory, plan = self._plan.directory, self._plan
        needed = 2 * file_bytes(self._slot_bytes, plan.block_count)
        try:
            free = shutil.disk_usage(directory).free
            folder = Path(tempfile.mkdtemp(prefix="baton-bench-", dir=directory))
        except OSError as error:
            raise SetupError(f"--dir {directory}: {error.strerror}") from error
        if free < needed:
            folder.rmdir()
            raise SetupError(f"--dir {directory}: {needed} bytes needed, {free} free: lower --blocks")
        return folder

    def _open(self, io: IoChoice) -> tuple[BlockFile, int]:
        plan = self._plan
        file, recovered = BlockFile.open(
            self._folder,
            block_bytes=plan.block_bytes,
            slot_bytes=self._slot_bytes,
            slot_count=plan.block_count,
            io=io,
        )
        return file, len(recovered)

    def _write(self, file: BlockFile, slot: int) -> None:
        place = slot % ARENA_SLOTS
        file.write(slot, self._arena.view(place), self._facts[slot], self._checksums[place])

    def _read(self, file: BlockFile, slot: int) -> None:
        # Read into memory of the thread's own, because two threads may be at slots that share a place in the
        # arena.
        file.read(slot, self._buffers.get(self._slot_bytes), self._facts[slot].block_hash)

    def _timed(self, slots: list[int], work: Callable[[int], None]) -> float:
        """Payload bytes per second."""
        seconds = _on_threads(slots, self._plan.threads, work)
        return len(slots) * self._plan.block_bytes / seconds

    def _compare(self, samples: "_Samples", kind: str, mode: IoMode) -> None:
        """Add the speed of the compared programs: payload bytes per second, as a part of all that they
        move."""
        path, plan = self._folder / "plain", self._plan
        payload_share = plan.block_bytes / slot_disk_bytes(self._slot_bytes)
        calls = self._fio_calls(path, kind, mode) if shutil.which("fio") else {}
        calls = calls or {"bare threads": lambda: self._bare(path, kind, mode)}
        for name, call in calls.items():
            if kind == "write":  # a new file for each: the second would write to what the first has allocated
                path.unlink(missing_ok=True)
                path.touch()
                os.truncate(path, plan.block_count * slot_disk_bytes(self._slot_bytes))
            drop_cache(path)
            samples.add(_COMPARED_WITH[kind], call() * payload_share, other=name)

    def _fio_calls(self, path: Path, kind: str, mode: IoMode) -> dict[str, Callable[[], float]]:
        plan, size = self._plan, slot_disk_bytes(self._slot_bytes)
        share = plan.block_count // plan.threads * size
        common = ["fio", "--name=bench", f"--filename={path}", f"--bs={size}", f"--rw={kind}", "--thread"]
        common += [f"--direct={int(mode == 'direct')}", "--fallocate=none", "--group_reporting"]
        common += ["--output-format=json", "--randrepeat=0", "--invalidate=1"]
        threads = ["--ioengine=psync", f"--numjobs={plan.threads}"]
        threads += [f"--size={share}", f"--offset_increment={share}"]
        ring = ["--ioengine=io_uring", f"--iodepth={plan.threads}", f"--size={size * plan.block_count}"]
        return {
            "fio psync": lambda: _fio_rate([*common, *threads], kind),
            "fio io_uring": lambda: _fio_rate([*common, *ring], kind),
        }

    def _bare(self, path: Path, kind: str, mode: IoMode) -> float:
        plan, size = self._plan, slot_disk_bytes(self._slot_bytes)
        order = list(range(plan.block_count))
        if kind != "write":
            random.Random(kind).shuffle(order)
        with closing(Device(path, mode)) as device:
            transfer = device.read if kind == "randread" else device.write
            seconds = _on_threads(
                order, plan.threads, lambda slot: transfer([self._buffers.get(size)], slot * size)
            )
        return plan.block_count * size / seconds

    def _labels_per_s(self, mode: IoMode) -> float:
        self._progress("SSD: recovery scan")
        times: list[float] = []
        for _ in range(self._plan.rounds):
            drop_cache(next(self._folder.glob("blocks-*.kv")))
            started_s = time.perf_counter()
            file, count = self._open(mode)
            times.append(time.perf_counter() - started_s)
            file.close()
            if count != self._plan.block_count:
                raise SetupError(f"recovery found {count} of {self._plan.block_count} blocks")
        return self._plan.block_count / statistics.median(times)


class _Samples:
    """Our speeds by operation, and those of others by operation and program."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, what: str, value: float, *, other: str = "") -> None:
        self._values.setdefault(what, {}).setdefault(other, []).append(value)

    def rates(self) -> list[MeasuredRate]:
        """Our median speeds, with the best of the others'."""
        found: list[MeasuredRate] = []
        for what, by_whom in self._values.items():
            medians = {name: statistics.median(values) for name, values in by_whom.items()}
            ours = medians.pop("")
            best = max(medians, key=lambda name: medians[name])
            found.append(MeasuredRate(f"SSD {what}", ours, best, medians[best]))
        return found


def drop_cache(path: Path) -> None:
    """Drop the file's pages from the page cache, so that it is read from the disk again."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _facts(index: int) -> BlockFacts:
    block_hash = BlockHash(hashlib.sha256(index.to_bytes(8, "little")).digest())
    return BlockFacts(block_hash, block_hash, index)


def _on_threads(slots: Iterable[int], threads: int, work: Callable[[int], None]) -> float:
    """Seconds until `work` was done for all slots, with this many threads."""
    waiting, guard = iter(slots), threading.Lock()

    def loop() -> None:
        while True:
            with guard:
                slot = next(waiting, None)
            if slot is None:
                return
            work(slot)

    with ThreadPoolExecutor(threads) as pool:
        started_s = time.perf_counter()
        for ended in [pool.submit(loop) for _ in range(threads)]:
            ended.result()
        return time.perf_counter() - started_s


def _fio_rate(command: list[str], kind: str) -> float:
    """Bytes per second. Raises SetupError if fio fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_TIMEOUT_S, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job["read" if kind == "randread" else "write"]["bw_bytes"])
    except subprocess.CalledProcessError as error:
        raise SetupError(f"fio failed: {error.stderr.strip().splitlines()[-1:]}") from error
    except (subprocess.TimeoutExpired, ValueError, KeyError, IndexError) as error:
        raise SetupError(f"fio gave no result: {error}") from error
