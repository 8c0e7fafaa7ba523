"""What is kept of files and batches, and how OpenAI's API shows it. Pure."""

import re
from typing import Any

import msgspec

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
"""Ids become names of files, so nothing else may be one."""

OVER = frozenset({"completed", "failed", "expired", "cancelled"})
"""States that a batch stays in."""

ENDPOINTS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"}
)


class FileRecord(msgspec.Struct, frozen=True):
    file_id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchFault(msgspec.Struct, frozen=True):
    """A reason for which a batch is not run."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] = {}
    status: str = "validating"
    times: dict[str, int] = {}
    """When states began, by OpenAI's names: in_progress_at, completed_at, …"""
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[BatchFault, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def moved(self, status: str, now: int, **changes: Any) -> "BatchRecord":
        """Return the batch in a new state. A batch that is over stays as it is."""
        if self.is_over:
            return self
        times = self.times | {f"{status}_at": now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def as_dict(self) -> dict[str, Any]:
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        faults = [msgspec.to_builtins(fault) for fault in self.faults]
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class BatchBounds(msgspec.Struct, frozen=True):
    file_bytes_max: int
    tenant_bytes_max: int
    files_max: int
    """Most files of one tenant, those with results included."""
    requests_max: int
    """Most requests of one batch."""
    batches_max: int
    """Most batches of one tenant that are not over."""
    keep_s: float
    """Seconds after which files, and batches that are over, are forgotten."""
