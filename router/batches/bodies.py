"""The fields of a request for a batch. Pure."""

import msgspec


class OutputExpiry(msgspec.Struct, frozen=True):
    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
