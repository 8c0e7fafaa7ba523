"""Files and batches in a folder, which routers of one machine, or of one shared volume, use together.

    TENANT/files/ID.json, ID.data     a file
    TENANT/batches/ID.json            a batch, written by the router that runs it
    TENANT/batches/ID.cancel          somebody asked for its end
    TENANT/batches/ID.lock            locked by the router that runs it, for as long as that lives
    TENANT/batches/ID.output, ID.error   results so far; they become files

Records are replaced as a whole, and results are appended line by line, so that a crash loses nothing but the
line that was being written.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from baton.core.errors import ClientError, Overloaded
from router.batches.records import BATCH_ID, FILE_ID, BatchBounds, BatchRecord, FileRecord

R = TypeVar("R", FileRecord, BatchRecord)

COPY_BYTES = 1 << 20


class ObjectNotFound(ClientError):
    http_status = 404


class ObjectInUse(ClientError):
    http_status = 409


class StateFolder:
    """The folder. Every method does IO and runs in a thread; all of them raise OSError."""

    def __init__(self, root: Path, bounds: BatchBounds) -> None:
        self.root, self.bounds = root, bounds

    def _of(self, tenant: str, kind: str) -> Path:
        return self.root / f"tenant-{tenant}" / kind

    # --- files ------------------------------------------------------------------------------------

    def add_file(self, tenant: str, record: FileRecord, source: BinaryIO) -> FileRecord:
        """Keep a file. Raises ClientError if the tenant has too many, or too large ones."""
        self.purge(tenant)
        held = self.files(tenant)
        bounds = self.bounds
        if len(held) >= bounds.files_max:
            raise ClientError(
                f"at most {bounds.files_max} files are kept for a tenant: delete some", param="file"
            )
        if sum(one.size for one in held) + record.size > bounds.tenant_bytes_max:
            raise ClientError(
                f"a tenant's files may have {bounds.tenant_bytes_max} bytes together: delete some",
                param="file",
            )
        folder = self._of(tenant, "files")
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{record.file_id}.part"
        with part.open("wb") as target:
            while chunk := source.read(COPY_BYTES):
                target.write(chunk)
        part.rename(folder / f"{record.file_id}.data")
        _write(folder / f"{record.file_id}.json", record)
        return record

    def files(self, tenant: str) -> list[FileRecord]:
        """Return all files, newest first."""
        return _newest_first(self._of(tenant, "files"), FileRecord)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record. Raises ObjectNotFound."""
        if FILE_ID.fullmatch(file_id) is not None:
            with contextlib.suppress(FileNotFoundError):
                return _read(self._of(tenant, "files") / f"{file_id}.json", FileRecord)
        raise ObjectNotFound(f"No such File object: {file_id:.80}", param="file_id")

    def data_path(self, tenant: str, file_id: str) -> Path:
        """Return the path of a file's content. Raises ObjectNotFound."""
        self.file(tenant, file_id)
        return self._of(tenant, "files") / f"{file_id}.data"

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises ObjectNotFound, and ObjectInUse while a batch reads it."""
        self.file(tenant, file_id)
        for batch in self.batches(tenant):
            if batch.input_file_id == file_id and not batch.is_over:
                raise ObjectInUse(
                    f"{file_id} is the input of {batch.batch_id}, which is not over: cancel that first",
                    param="file_id",
                )
        self._remove(self._of(tenant, "files") / file_id)

    def _remove(self, stem: Path) -> None:
        for suffix in (".json", ".data", ".part", ".lock", ".cancel", ".output", ".error"):
            stem.with_name(stem.name + suffix).unlink(missing_ok=True)

    def purge(self, tenant: str) -> None:
        """Forget what is older than things are kept."""
        now = time.time()
        for file in self.files(tenant):
            if file.expires_at <= now:
                self._remove(self._of(tenant, "files") / file.file_id)
        for batch in self.batches(tenant):
            if batch.is_over and batch.created_at + self.bounds.keep_s <= now:
                self._remove(self._of(tenant, "batches") / batch.batch_id)

    # --- batches ----------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> BatchRecord:
        """Keep a new batch. Raises ObjectNotFound for its input, Overloaded if the tenant has too many."""
        self.file(record.tenant, record.input_file_id)
        running = [one for one in self.batches(record.tenant) if not one.is_over]
        if len(running) >= self.bounds.batches_max:
            raise Overloaded(
                f"a tenant may have {self.bounds.batches_max} batches that are not over: wait for one",
                retry_after_s=60.0,
            )
        self._of(record.tenant, "batches").mkdir(parents=True, exist_ok=True)
        self.write_batch(record)
        return record

    def write_batch(self, record: BatchRecord) -> None:
        _write(self._of(record.tenant, "batches") / f"{record.batch_id}.json", record)

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return all batches, newest first."""
        found = _newest_first(self._of(tenant, "batches"), BatchRecord)
        return [self._seen(record) for record in found]

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises ObjectNotFound."""
        if BATCH_ID.fullmatch(batch_id) is not None:
            with contextlib.suppress(FileNotFoundError):
                path = self._of(tenant, "batches") / f"{batch_id}.json"
                return self._seen(_read(path, BatchRecord))
        raise ObjectNotFound(f"No such Batch object: {batch_id:.80}", param="batch_id")

    def _seen(self, record: BatchRecord) -> BatchRecord:
        """Return a batch as clients see it: one that was asked to end is ending."""
        if record.is_over or not self.is_cancelled(record):
            return record
        return record.moved("cancelling", int(self._cancel_path(record).stat().st_mtime))

    def _cancel_path(self, record: BatchRecord) -> Path:
        return self._of(record.tenant, "batches") / f"{record.batch_id}.cancel"

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Ask for the end of a batch. Raises ObjectNotFound, and ObjectInUse if it is over."""
        record = self.batch(tenant, batch_id)
        if record.is_over:
            raise ObjectInUse(f"{batch_id} is {record.status} already", param="batch_id")
        self._cancel_path(record).touch()
        return self.batch(tenant, batch_id)

    def is_cancelled(self, record: BatchRecord) -> bool:
        return self._cancel_path(record).exists()

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches of all tenants that are not over, oldest first."""
        found = [
            record
            for folder in self.root.glob("tenant-*/batches")
            for record in _newest_first(folder, BatchRecord)
            if not record.is_over
        ]
        return sorted(found, key=lambda record: (record.created_at, record.batch_id))

    def claim(self, record: BatchRecord) -> BinaryIO | None:
        """Return an open file that holds the claim to run a batch. None: another router has it."""
        path = self._of(record.tenant, "batches") / f"{record.batch_id}.lock"
        claim = path.open("ab")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            return None
        return claim

    def results_path(self, record: BatchRecord, kind: str) -> Path:
        return self._of(record.tenant, "batches") / f"{record.batch_id}.{kind}"

    def lines(self, path: Path) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            yield from file

    def append(self, record: BatchRecord, kind: str, line: bytes) -> None:
        """Append a result. What a crash left of a line is ended first."""
        with self.results_path(record, kind).open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.truncate(_last_line_start(file, size))
            file.write(line)

    def as_file(self, record: BatchRecord, kind: str, file: FileRecord) -> FileRecord | None:
        """Make results a file. None: there are none."""
        path = self.results_path(record, kind)
        if not path.exists():
            return None
        folder = self._of(record.tenant, "files")
        found = msgspec.structs.replace(file, size=path.stat().st_size)
        path.rename(folder / f"{file.file_id}.data")
        _write(folder / f"{file.file_id}.json", found)
        return found


def _last_line_start(file: BinaryIO, size: int) -> int:
    """Return where the last line begins."""
    at = size
    while at > 0:
        begin = max(0, at - COPY_BYTES)
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def _read(path: Path, kind: type[R]) -> R:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    part = path.with_suffix(f".{os.getpid()}.new")
    part.write_bytes(msgspec.json.encode(record))
    part.rename(path)


def _newest_first(folder: Path, kind: type[R]) -> list[R]:
    found: list[R] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found.append(_read(path, kind))
    found.sort(key=_age, reverse=True)
    return found


def _age(record: FileRecord | BatchRecord) -> tuple[int, str]:
    own = record.file_id if isinstance(record, FileRecord) else record.batch_id
    return record.created_at, own
