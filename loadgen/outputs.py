"""What a run is judged by and where its report goes: options and their handling, the same for every command
that makes reports."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from baton.core.errors import SetupError
from baton.terminal import new_console
from loadgen.files import check_writable, report_bytes, write_file, write_records
from loadgen.html.page import render
from loadgen.records import Record
from loadgen.report import Report
from loadgen.show import show_report
from loadgen.slo import Slo, parse_class_slo

STDOUT = "-"
ATTAIN = 0.9
_TTFT = typer.Option(min=0, help="Target for the first token, seconds.")
_TPOT = typer.Option(min=0, help="Target per token after the first, seconds.")
_CLASS = typer.Option(
    "--class-slo", help="NAME=TTFT/TPOT: targets of one class, seconds, - for none; may be given again."
)
_ATTAIN = typer.Option(
    min=0.01, max=1, help="Share of requests that should meet both targets; default: 0.9.", show_default=False
)
_SCALES = typer.Option(help="Judge by both targets times each of these, such as 0.5,1,2.")
_LABEL = typer.Option(help="Name of the run where several are compared.")
_JSON = typer.Option("--json", help="Write the report there; - is standard output.")
_HTML = typer.Option("--html", help="Write the report there as one self-contained page.")
_RECORDS = typer.Option(
    "--records", help="Write a line per request there (.gz: compressed): for other targets later."
)
_SAME_ANSWERS = typer.Option(
    "--same-answers-as",
    help="Records of an earlier run of the same requests: answers that differ are told, and the status is 1.",
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What requests must meet."""

    ttft_slo: Annotated[float | None, _TTFT] = None
    tpot_slo: Annotated[float | None, _TPOT] = None
    class_slo: Annotated[list[str], _CLASS] = field(default_factory=list[str])
    attain: Annotated[float | None, _ATTAIN] = None
    slo_scale: Annotated[str, _SCALES] = ""

    @property
    def goal(self) -> float:
        """Share of requests that should meet both targets."""
        return ATTAIN if self.attain is None else self.attain

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_slo, self.tpot_slo)

    def class_slos(self) -> dict[str, Slo]:
        """Raises SetupError."""
        return dict(parse_class_slo(text) for text in self.class_slo)

    def scales(self) -> tuple[float, ...]:
        """Ascending; empty: the usual ones. Raises SetupError."""
        try:
            scales = sorted({float(part) for part in self.slo_scale.split(",") if part.strip()})
        except ValueError:
            scales = [0.0]
        if any(not 0 < scale < 1e6 for scale in scales):
            raise SetupError(f"--slo-scale {self.slo_scale!r}: write positive factors such as 0.5,1,2")
        return tuple(scales)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the report goes, beside the terminal."""

    label: Annotated[str, _LABEL] = ""
    json_to: Annotated[str, _JSON] = ""
    html_to: Annotated[Path | None, _HTML] = None
    records_to: Annotated[Path | None, _RECORDS] = None
    same_answers_as: Annotated[Path | None, _SAME_ANSWERS] = None

    def check(self) -> None:
        """Whether all that is asked for can be written. Raises SetupError."""
        check_writable(_file(self.json_to), self.html_to, self.records_to)


def _file(to: str) -> Path | None:
    """Of an option that takes a file or standard output."""
    return Path(to) if to not in ("", STDOUT) else None


def publish(report: Report, records: Sequence[Record], outputs: OutputOptions) -> None:
    """Tables on standard output, or on standard error where that is taken by `--json -`; then the files.

    Raises SetupError.
    """
    show_report(new_console(stderr=outputs.json_to == STDOUT), report)
    write_json(report_bytes(report), outputs.json_to)
    if outputs.html_to is not None:
        write_file(outputs.html_to, render([report]).encode())
    if outputs.records_to is not None:
        write_records(outputs.records_to, records, report.settings)


def write_json(content: bytes, to: str) -> None:
    """Nowhere if `to` is empty. Raises SetupError."""
    if to == STDOUT:
        sys.stdout.write(content.decode())
    elif to:
        write_file(Path(to), content)
