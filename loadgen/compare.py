"""`baton compare` puts the reports of several runs side by side, also for objectives other than the runs'
own."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer

from baton.core.errors import SetupError
from baton.files.outputs import in_turn, is_stdout
from baton.files.terminal import new_console
from loadgen.files import read_run
from loadgen.html.page import RUNS_MAX, render
from loadgen.options import as_command
from loadgen.outputs import ObjectiveOptions, check_outputs, write_to
from loadgen.report import ClassObjectives, Report
from loadgen.report.summary import differences, ratio_to_first, summary_rows
from loadgen.show import show_comparison

COMPARISON_SCHEMA = "baton-comparison/1"
_RUNS = typer.Argument(help="Reports (--json) or records (--records) of `baton replay` or `baton simulate`.")
_LABELS = typer.Option("--label", help="Name of a run, in the order of the files; repeatable.")
_JSON = typer.Option("--json", help="Write figures and ratios to this file; - is standard output.")
_HTML = typer.Option("--html", help="Write one self-contained page to this file.")
_TITLE = typer.Option(help="Title of the page.")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ObjectiveOptions):
    """The parameters of `compare`."""

    runs: Annotated[list[Path], _RUNS]
    labels: Annotated[list[str], _LABELS] = field(default_factory=list[str])
    json_to: Annotated[str, _JSON] = ""
    html_to: Annotated[Path | None, _HTML] = None
    title: Annotated[str, _TITLE] = ""


def _compare_command(asked: CompareOptions) -> None:
    """Compare runs: figures and their ratios to the first run, as tables, JSON and one HTML page.

    Records can be judged by objectives other than those of their run; reports cannot.

    Example:

    baton compare baton.json vllm.json --html compared.html

    baton compare baton.jsonl vllm.jsonl --ttft-slo 0.5 --tpot-slo 0.05 --slo-scale 0.5,1,2
    """
    try:
        _check_labels(asked)
        check_outputs({"--json": asked.json_to, "--html": asked.html_to})
        reports = [_read(asked, i) for i in range(len(asked.runs))]
        if not 0 < len(reports) <= RUNS_MAX:
            raise SetupError(f"{len(reports)} runs given: give 1 to {RUNS_MAX}")
        known = {group.name for report in reports for group in report.classes}
        ClassObjectives(by_class=asked.class_slos()).check_classes(known)
        console = new_console(stderr=is_stdout(asked.json_to) or is_stdout(asked.html_to))
        in_turn(
            (
                lambda: show_comparison(console, reports, with_scales=bool(asked.slo_scale)),
                lambda: write_to(asked.html_to, lambda: render(reports, title=asked.title).encode()),
                lambda: write_to(asked.json_to, lambda: comparison_bytes(reports)),
            )
        )
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None


compare = as_command(CompareOptions, _compare_command)


def _check_labels(asked: CompareOptions) -> None:
    if len(asked.labels) > len(asked.runs):
        raise SetupError(
            f"{len(asked.labels)} --label for {len(asked.runs)} runs: give one label per run, or none"
        )


def _read(asked: CompareOptions, position: int) -> Report:
    path = asked.runs[position]
    change: dict[str, object] = {}
    if asked.ttft_slo is not None or asked.tpot_slo is not None:
        change["slo"] = asked.slo
    if asked.class_slo:
        change["class_slos"] = asked.class_slos()
    if asked.attain is not None:
        change["attain"] = asked.attain
    report = read_run(path, change=change, scales=asked.scales())
    label = asked.labels[position] if position < len(asked.labels) else report.settings.label or path.stem
    return replace(report, settings=replace(report.settings, label=label))


def comparison_bytes(reports: list[Report]) -> bytes:
    """The reports, and their figures with ratios to the first, as JSON."""
    figures = {
        path: {
            "name": name,
            "values": values,
            "ratios_to_first": [ratio_to_first(values, run) for run in range(len(values))],
        }
        for (name, path, _, _), values in summary_rows(reports)
    }
    whole = {
        "schema": COMPARISON_SCHEMA,
        "labels": [r.label for r in reports],
        "differences": differences(reports),
        "figures": figures,
        "reports": [r.as_json() for r in reports],
    }
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2) + b"\n"
