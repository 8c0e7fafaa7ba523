"""What a run is judged by and where its report goes: options and their handling, the same for every command
that makes reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from baton.core.errors import SetupError
from baton.files.outputs import check_apart, check_writable, in_turn, is_stdout
from baton.files.terminal import new_console
from loadgen.files import report_bytes, write_file, write_records
from loadgen.html.page import render
from loadgen.options import target
from loadgen.records import Record
from loadgen.report import Report
from loadgen.show import show_report
from loadgen.slo import Slo, parse_class_slo, slo_of

ATTAIN = 0.9
_TTFT = typer.Option(parser=target, metavar="SECONDS", help="Target for the first token; none: no target.")
_TPOT = typer.Option(
    parser=target, metavar="SECONDS", help="Target per token after the first; none: no target."
)
_CLASS = typer.Option(
    "--class-slo", help="NAME=TTFT/TPOT: targets of one class, seconds, - for none; may be given again."
)
_ATTAIN = typer.Option(
    min=0.01, max=1, help="Share of requests that should meet both targets; default: 0.9.", show_default=False
)
_SCALES = typer.Option(help="Judge by both targets times each of these, such as 0.5,1,2.")
_LABEL = typer.Option(help="Name of the run where several are compared.")
_JSON = typer.Option("--json", help="Write the report there; - is standard output.")
_HTML = typer.Option("--html", help="Write the report there as one self-contained page; - too.")
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
        return slo_of(self.ttft_slo, self.tpot_slo)

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
        check_outputs({"--json": self.json_to, "--html": self.html_to, "--records": self.records_to})


def check_outputs(places: Mapping[str, Path | str | None]) -> None:
    """By option. Raises SetupError: two are one place, or one cannot be written."""
    check_apart(places)
    check_writable(*places.values())


def publish(report: Report, records: Sequence[Record], outputs: OutputOptions) -> None:
    """Tables on standard output, or on standard error where that is taken by an output; then the files, each
    of them whatever becomes of the others.

    Raises CannotWrite.
    """
    to = outputs
    console = new_console(stderr=any(map(is_stdout, (to.json_to, to.html_to, to.records_to))))
    in_turn(
        (
            lambda: show_report(console, report),
            lambda: write_to(to.html_to, lambda: render([report]).encode()),
            lambda: write_to(to.json_to, lambda: report_bytes(report)),
            lambda: None if not to.records_to else write_records(to.records_to, records, report.settings),
        )
    )


def write_to(to: Path | str | None, make: Callable[[], bytes]) -> None:
    """Nowhere if `to` is empty. Raises CannotWrite."""
    if to:
        write_file(to, make())
