"""Files of reports and records, written as `baton.files.outputs` says and read back unchanged.

A report is one JSON object, and `schema` names its version. Records are JSON lines: the settings first, then
one line per request, with what is needed to judge the run by other objectives. Instants in records count from
the first planned one and are rounded to microseconds. Files whose names end in `.gz` are compressed.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path

import msgspec
import orjson

from baton.core.errors import SetupError
from baton.files.outputs import opened
from loadgen.records import RequestRecord
from loadgen.report import Report, RunSettings, judged
from loadgen.report.model import SCHEMA

RECORDS_SCHEMA = "baton-records/1"
_UNPACKED_BYTES_MAX = 4 * 2**30
_PIECE_BYTES = 2**20
_INSTANTS = ("planned_s", "sent_s", "ended_s", "trace_instant_s")


class _Head(msgspec.Struct):
    """The first line of a file of records."""

    schema: str
    settings: RunSettings


class _Schema(msgspec.Struct):
    schema: str = ""


def report_bytes(report: Report) -> bytes:
    return orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n"


def write_file(to: Path | str, content: bytes) -> None:
    """Raises CannotWrite."""
    _write(to, (content,))


def write_records(to: Path | str, records: Sequence[RequestRecord], settings: RunSettings) -> None:
    """Raises CannotWrite."""
    _write(to, _record_lines(records, settings))


def _write(to: Path | str, chunks: Iterable[bytes]) -> None:
    with opened(to) as plain:
        if Path(to).suffix == ".gz":
            with gzip.open(plain, "wb", compresslevel=6) as packed:
                packed.writelines(chunks)
        else:
            plain.writelines(chunks)


def _record_lines(records: Sequence[RequestRecord], settings: RunSettings) -> Iterator[bytes]:
    yield orjson.dumps({"schema": RECORDS_SCHEMA, "settings": settings}, option=orjson.OPT_APPEND_NEWLINE)
    origin_s = min((r.planned_s for r in records), default=0.0)
    for record in records:
        line = {f.name: getattr(record, f.name) for f in fields(record)}
        for name in _INSTANTS:
            line[name] = None if line[name] is None else round(line[name] - origin_s, 6)
        line["token_instants_s"] = [round(at_s - origin_s, 6) for at_s in record.token_instants_s]
        changed = {name: value for name, value in line.items() if value != _DEFAULTS[name]}
        # A simulator's numbers may be numpy types.
        yield orjson.dumps(changed, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


_DEFAULTS: dict[str, object] = {
    f.name: f.default_factory() if f.default_factory is not MISSING else f.default
    for f in fields(RequestRecord)
}


def read_run(path: Path, *, change: dict[str, object] | None = None, scales: Sequence[float] = ()) -> Report:
    """A report that was stored, or one made from records.

    `change` replaces settings (such as objectives) and `scales` asks for these SLO scales; both need records.
    Raises SetupError if the file is missing, is not ours, or has another version.
    """
    content = _read(path)
    first = content[: content.find(b"\n") + 1] or content
    if RECORDS_SCHEMA.encode() in first:
        settings, records = parse_records(content, name=str(path))
        return judged(records, replace(settings, **(change or {})), scales=scales)
    report = _parse_report(content, name=str(path))
    if scales or any(getattr(report.settings, name) != value for name, value in (change or {}).items()):
        raise SetupError(
            f"{path} is a report: other objectives need its records; run with --records FILE.jsonl, give that"
        )
    return report


def read_records(path: Path) -> list[RequestRecord]:
    """Raises SetupError."""
    return read_settings_and_records(path)[1]


def read_settings_and_records(path: Path) -> tuple[RunSettings, list[RequestRecord]]:
    """Raises SetupError."""
    return parse_records(_read(path), name=str(path))


def _read(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        content = bytearray()
        with gzip.open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                content += piece
                if len(content) > _UNPACKED_BYTES_MAX:
                    raise SetupError(
                        f"{path} unpacks to more than {_UNPACKED_BYTES_MAX} bytes: unpack it first"
                    )
        return bytes(content)
    except (OSError, EOFError, zlib.error) as error:
        raise SetupError(f"cannot read {path}: {error}") from None


def _parse_report(content: bytes, *, name: str) -> Report:
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            found = f"schema {schema}" if schema else "no schema"
            raise SetupError(f"{name} has {found}; known here: {SCHEMA} and {RECORDS_SCHEMA}")
        return msgspec.json.decode(content, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(f"{name} is no report of `baton replay` or `baton simulate`: {error}") from None


def parse_records(content: bytes, *, name: str) -> tuple[RunSettings, list[RequestRecord]]:
    """Raises SetupError."""
    lines = content.splitlines()
    try:
        head = msgspec.json.decode(lines[0], type=_Head)
        decoder = msgspec.json.Decoder(RequestRecord)
        records = [decoder.decode(line) for line in lines[1:]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise SetupError(f"{name} holds no records of a run: {error}") from None
    if any(r.outcome is None for r in records):
        raise SetupError(f"{name}: a request without an outcome")
    return head.settings, records
