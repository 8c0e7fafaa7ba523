"""The objectives that a run is judged by and the outputs of its report, the same for every command that makes
reports."""

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
from loadgen.records import RequestRecord
from loadgen.report import Report
from loadgen.show import show_report
from loadgen.slo import Slo, parse_class_slo, slo_of

ATTAIN = 0.9
_TTFT = typer.Option(parser=target, metavar="SECONDS", help="TTFT target in seconds; none: no target.")
_TPOT = typer.Option(parser=target, metavar="SECONDS", help="TPOT target in seconds; none: no target.")
_CLASS = typer.Option(
    "--class-slo", help="Targets of one class in seconds, - for none; repeatable.", metavar="NAME=TTFT/TPOT"
)
_ATTAIN = typer.Option(
    min=0.01, max=1, help="Share of requests that should meet both targets; default: 0.9.", show_default=False
)
_SCALES = typer.Option(help="Also judge by both targets multiplied by each of these, such as 0.5,1,2.")
_LABEL = typer.Option(help="Name of the run in comparisons.")
_JSON = typer.Option("--json", help="Write the report to this file; - is standard output.")
_HTML = typer.Option(
    "--html", help="Write the report to this file, as one self-contained page; - is standard output."
)
_RECORDS = typer.Option(
    "--records", help="Write one line per request to this file (.gz: compressed), for `baton compare`."
)
_SAME_ANSWERS = typer.Option(
    "--same-answers-as",
    help="Records of an earlier run of the same requests; exit with status 1 if an answer differs.",
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Objectives"""

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
        """SLO scales in ascending order; empty means the usual ones. Raises SetupError."""
        try:
            scales = sorted({float(part) for part in self.slo_scale.split(",") if part.strip()})
        except ValueError:
            scales = [0.0]
        if any(not 0 < scale < 1e6 for scale in scales):
            raise SetupError(f"--slo-scale {self.slo_scale!r}: write positive factors such as 0.5,1,2")
        return tuple(scales)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Outputs in addition to the terminal"""

    label: Annotated[str, _LABEL] = ""
    json_to: Annotated[str, _JSON] = ""
    html_to: Annotated[Path | None, _HTML] = None
    records_to: Annotated[Path | None, _RECORDS] = None
    same_answers_as: Annotated[Path | None, _SAME_ANSWERS] = None

    def check(self) -> None:
        """Check that all requested outputs can be written. Raises SetupError."""
        check_outputs({"--json": self.json_to, "--html": self.html_to, "--records": self.records_to})


def check_outputs(places: Mapping[str, Path | str | None]) -> None:
    """Check the outputs by option. Raises SetupError if two are the same place, or if one cannot be
    written."""
    check_apart(places)
    check_writable(*places.values())


def publish(report: Report, records: Sequence[RequestRecord], outputs: OutputOptions) -> None:
    """Print the tables on standard output, or on standard error if an output uses standard output. Then write
    the files; a failed one does not keep the others from being written.

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
    """Write the result of `make`, unless `to` is empty. Raises CannotWrite."""
    if to:
        write_file(to, make())
