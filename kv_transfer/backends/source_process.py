"""The host memory of a source on this host, as its readers use it: whose it is, and the table of generations.

A process id may be given again after a process ended. So the source keeps a random nonce in its memory, and
every read fetches it after the last byte: whoever has it then is the source, and has been since before the
read began, because a process that ended does not come back.
"""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from baton.core.errors import IncompatiblePeer, SetupError, TransferFailed
from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory
from kv_transfer.backends.cma_memory import (
    IOV_MAX,
    MemoryLost,
    ProcessMemory,
    ReadNotPermitted,
    Vectors,
    vector,
)
from kv_transfer.backends.copy_threads import StepFailed
from kv_transfer.layout import cover

OFFER_VERSION = 1
BLOCK_COUNT_MAX = 2**31 - 1
NONCE_BYTES = 16
GENERATION_BYTES = 8
COVER_GAP_ENTRIES = 128
"""A further range costs about as much as copying this many table entries."""


class ProcessOffer(msgspec.Struct, frozen=True):
    """What every offer to readers of this host has."""

    version: int
    host: str
    """Boot id and PID namespace: where `pid` means something."""
    pid: int
    nonce: bytes
    nonce_address: int
    block_bytes: int
    block_count: int
    generations_address: int


_Offer = TypeVar("_Offer", bound=ProcessOffer)


class Presence:
    """The nonce of this process's pool, and the fields of `ProcessOffer`. Raises SetupError."""

    def __init__(self) -> None:
        self.host = host_identity()
        self.nonce = np.frombuffer(bytearray(secrets.token_bytes(NONCE_BYTES)), np.uint8)

    def fields(self, memory: KVMemory) -> dict[str, Any]:
        return {
            "version": OFFER_VERSION,
            "host": self.host,
            "pid": os.getpid(),
            "nonce": self.nonce.tobytes(),
            "nonce_address": self.nonce.ctypes.data,
            "block_bytes": memory.block_bytes,
            "block_count": memory.block_count,
            "generations_address": memory.generations.ctypes.data,
        }

    def end(self) -> None:
        """Whoever reads from now on finds that the source has closed."""
        self.nonce[:] = 0


class SourceProcess:
    """The source behind an offer. `check` belongs to the event loop, the rest to the copying threads."""

    def __init__(self, process: ProcessMemory, offer: ProcessOffer) -> None:
        self._process, self._offer = process, offer

    def check(self, peer: WorkerId, *, host: str) -> None:
        """Raises IncompatiblePeer or TransferFailed: its memory cannot be read from here."""
        offer = self._offer
        if offer.host != host:
            raise IncompatiblePeer(f"{peer} is on another host, or in another PID namespace")
        try:
            found = self._process.read_bytes(offer.pid, offer.nonce_address, NONCE_BYTES)
        except ReadNotPermitted as error:
            reason = f"this process may not read that of {peer} ({error}): it must have the same user, and"
            raise IncompatiblePeer(f"{reason} kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE") from None
        except MemoryLost as error:
            raise TransferFailed(f"{peer}: {error}") from None
        if found != offer.nonce:
            raise TransferFailed(f"{peer} has closed, or its process id belongs to another process")

    def read(self, local: Vectors, remote: Vectors) -> None:
        """Raises StepFailed."""
        try:
            self._process.read(self._offer.pid, local, remote)
        except (MemoryLost, ReadNotPermitted) as error:
            raise StepFailed(str(error)) from error

    def generations(self, blocks: Sequence[int]) -> list[int]:
        """What ends a read: the generations as they are now, if the source is still there. Raises
        StepFailed."""
        found = self._generations(blocks)
        nonce = np.zeros(NONCE_BYTES, np.uint8)
        self.read(vector(nonce.ctypes.data, NONCE_BYTES), vector(self._offer.nonce_address, NONCE_BYTES))
        if nonce.tobytes() != self._offer.nonce:
            raise StepFailed("the source has closed, or its process id belongs to another process")
        return found

    def _generations(self, blocks: Sequence[int]) -> list[int]:
        """Entries of the source's table, those between near ones along with them."""
        if not blocks:
            return []
        ranges = cover(blocks, gap_max=COVER_GAP_ENTRIES)
        starts = np.array([r.start for r in ranges], np.uint64)
        counts = np.array([len(r) for r in ranges], np.uint64)
        table = np.empty(int(counts.sum()), np.uint64)
        base = np.uint64(self._offer.generations_address)
        there = np.stack(
            [base + starts * np.uint64(GENERATION_BYTES), counts * np.uint64(GENERATION_BYTES)], 1
        )
        address = table.ctypes.data
        for part in range(0, len(there), IOV_MAX):
            rows = np.ascontiguousarray(there[part : part + IOV_MAX])
            size = int(rows[:, 1].sum())
            self.read(vector(address, size), rows)
            address += size
        firsts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts)[:-1]])
        asked = np.array(blocks, np.uint64)
        which = np.searchsorted(starts, asked, side="right") - 1
        return table[(firsts[which] + asked - starts[which]).astype(np.int64)].tolist()


def host_identity() -> str:
    """Equal in two processes exactly if a process id means the same process to both. Raises SetupError."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        raise SetupError(f"/proc does not say which host this is: {error}") from error


def parse_process_offer(kind: type[_Offer], offer: bytes, *, block_bytes: int, backend: str) -> _Offer:
    """Raises IncompatiblePeer: malformed, another version, other blocks than expected. What `kind` has beyond
    `ProcessOffer` is for the caller to check."""
    try:
        parsed = msgspec.msgpack.decode(offer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompatiblePeer(f"malformed {backend} offer: {error}") from error
    if parsed.version != OFFER_VERSION:
        raise IncompatiblePeer(f"{backend} offer version {parsed.version}, not {OFFER_VERSION}")
    if parsed.block_bytes != block_bytes:
        raise IncompatiblePeer(f"blocks of {parsed.block_bytes} B, not {block_bytes} B")
    ends = (
        parsed.generations_address + GENERATION_BYTES * parsed.block_count,
        parsed.nonce_address + NONCE_BYTES,
    )
    is_sane = (
        0 < parsed.block_count <= BLOCK_COUNT_MAX
        and min(parsed.generations_address, parsed.nonce_address) > 0
        and max(ends) < 2**63
        and 0 < parsed.pid < 2**31
        and len(parsed.nonce) == NONCE_BYTES
        and any(parsed.nonce)
    )
    if not is_sane:
        raise out_of_range(backend)
    return parsed


def out_of_range(backend: str) -> IncompatiblePeer:
    return IncompatiblePeer(f"malformed {backend} offer: a field is out of range")
