"""`baton plan` searches the cheapest cluster for a trace over the fleet simulator."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.core.errors import SetupError
from baton.files.outputs import check_writable
from loadgen.files import write_file
from loadgen.lengths import ReplayPlan, TraceScaling, make_plan, parse_factor
from loadgen.sources import open_trace
from loadgen.traces import cut
from simulator.fleet.setup import BATCH_SEQUENCES, STEP_TOKENS, block_tokens_of
from simulator.models import ModelShape, find_model
from simulator.plan.clusters import ReplicaShape
from simulator.plan.search import Found, Tried, search
from simulator.plan.shapes import (
    EngineSize,
    PlannedLoad,
    PlanObjectives,
    is_slower,
    kinds,
    parse_prices,
    shapes,
)
from simulator.plan.show import PlanResult, share_of, show, words
from simulator.plan.values import helm_values
from simulator.plan.verify import verify

HEADROOM_STEPS = (1.1, 1.25, 1.5, 1.75, 2.0)

_Trace = Annotated[str, typer.Argument(help="A trace that `baton replay` takes, or synth:NAME.")]
_Model = Annotated[
    str, typer.Option(help="A known name (llama-3-70b …), a Hugging Face folder or config.json.")
]
_Gpus = Annotated[
    list[str],
    typer.Option(
        "--gpu", metavar="NAME=PRICE", help="A GPU offered, with its dollars per hour, above 0; repeatable."
    ),
]
_Ttft = Annotated[float, typer.Option(min=0.001, help="Objective for the first token, seconds.")]
_Tpot = Annotated[float, typer.Option(min=0.0001, help="Objective per token after the first, seconds.")]
_Attain = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet both.")]
_Rate = Annotated[
    float | None, typer.Option(min=0.0001, help="Requests per second; the trace's own by default.")
]
_Headroom = Annotated[float, typer.Option(min=1.0, help="Multiple of the rate to plan for.")]
_Widths = Annotated[str, typer.Option(metavar="N,N…", help="Tensor-parallel widths to try.")]
_Stages = Annotated[str, typer.Option(metavar="N,N…", help="Pipeline stages to try.")]
_Weights = Annotated[
    float, typer.Option(min=0.25, max=4, help="Bytes per weight: 2 for bf16, 1 for fp8 or int8.")
]
_LengthScale = Annotated[str, typer.Option(help="Factor for input and output lengths.")]
_Limit = Annotated[int, typer.Option(min=50, help="Requests of the trace that each simulation runs.")]
_Simulations = Annotated[int, typer.Option(min=1, help="Most clusters to simulate.")]
_Values = Annotated[
    Path | None, typer.Option(help="Write the cheapest cluster to this file, as Helm values.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The load, the model and the objectives that are planned for."""

    model: ModelShape
    plan: ReplayPlan
    own_rate: float
    """Rate of `plan` in requests per second."""
    rate: float
    headroom: float
    objectives: PlanObjectives
    size: EngineSize

    def load_at(self, headroom: float) -> PlannedLoad:
        rate = self.rate * headroom
        return PlannedLoad(self.plan, rate / self.own_rate, rate, self.objectives, self.size)


def plan(
    trace: _Trace,
    model: _Model,
    ttft_slo: _Ttft,
    tpot_slo: _Tpot,
    gpus: _Gpus,
    attain: _Attain = 0.9,
    rate: _Rate = None,
    headroom: _Headroom = 1.2,
    tensor: _Widths = "1,2,4,8",
    pipeline: _Stages = "1",
    weight_bytes: _Weights = 2.0,
    length_scale: _LengthScale = "1",
    limit: _Limit = 2000,
    simulations: _Simulations = 100,
    values: _Values = None,
    json: _Json = False,
) -> None:
    """Find the cheapest cluster (shapes, pools, replicas) that serves a trace within its objectives.

    Whole clusters are simulated with the production router until none that is cheaper than the best can
    attain the goal. `baton simulate` says the same of the same cluster.

    Example: baton plan conversation.jsonl --model llama-3-8b --gpu h100=2.99 --gpu a100=1.79 --ttft-slo 5
    --tpot-slo 0.05 --rate 10 --tensor 1,2 --values plan.yaml
    """
    console = Console(stderr=True)
    try:
        check_writable(values)
        prices = parse_prices(gpus)
        widths, stages = _numbers(tensor), _numbers(pipeline)
        _check_numbers(rate=rate, headroom=headroom, ttft_slo=ttft_slo, tpot_slo=tpot_slo,
                       attain=attain, weight_bytes=weight_bytes)  # fmt: skip
        asked = _requests(trace, limit, parse_factor(length_scale))
        own_rate = _own_rate(asked, trace)
        task = PlanTask(
            model=find_model(model),
            plan=asked,
            own_rate=own_rate,
            rate=own_rate if rate is None else rate,
            headroom=headroom,
            objectives=PlanObjectives(ttft_slo, tpot_slo, attain),
            size=EngineSize(STEP_TOKENS, BATCH_SEQUENCES),
        )
        listed = shapes(
            task.model, prices, tensors=widths, pipelines=stages, weight_bytes=weight_bytes,
            block_tokens=block_tokens_of(asked),
        )  # fmt: skip
        found = _search(task, listed, simulations, console)
        done = PlanResult(task.model.name, task.rate, task.headroom, _headroom(task, found, console),
                    task.objectives, found)  # fmt: skip
        _publish(done, values=values, as_json=json)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None
    if found.best is None:
        raise typer.Exit(1)


def _requests(trace: str, limit: int, length_scale: Fraction) -> ReplayPlan:
    """Make the same plan of the trace as `baton simulate` does. Raises SetupError."""
    taken = cut(open_trace(trace, requests=limit), limit=limit)
    return make_plan(taken, TraceScaling(length_scale, length_scale), spread=True, seed=0)


def _own_rate(asked: ReplayPlan, trace: str) -> float:
    span_s = asked.requests[-1].at_s - asked.requests[0].at_s
    if span_s <= 0:
        raise SetupError(f"{trace}: all its requests come at one instant; a plan needs a trace with a rate")
    return (len(asked.requests) - 1) / span_s


def _check_numbers(**options: float | None) -> None:
    """Refuse NaN and infinity, which bounds of options let through where they are open."""
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            flag = "--" + name.replace("_", "-")
            raise SetupError(f"{flag} {value:g}: give a finite number, such as {_EXAMPLES.get(name, '1')}")


_EXAMPLES = {
    "rate": "10 requests per second, or leave it out for the trace's own rate",
    "headroom": "1.2, to plan for 1.2 times the rate",
    "ttft_slo": "5 seconds",
    "tpot_slo": "0.05 seconds",
    "attain": "0.9",
    "weight_bytes": "2",
}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SetupError(f"{text!r} is not a list of widths such as 1,2,4")
    return numbers


def _search(task: PlanTask, listed: Sequence[ReplicaShape], simulations: int, console: Console) -> Found:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    load = task.load_at(task.headroom)
    with Progress(*columns, console=console) as progress:
        alone = progress.add_task("shapes alone", total=len(listed))
        able = kinds(load, listed, on_done=lambda: progress.advance(alone))
        whole = progress.add_task(f"clusters, at most {simulations}", total=None)

        def on_tried(one: Tried) -> None:
            progress.advance(whole)
            mark = "yes" if one.passed else "no"
            line = f"  {mark:>3} {share_of(one.verdict):>8}  {words(one.plan)}"
            progress.console.print(line, highlight=False, soft_wrap=True)

        return search(
            able,
            lambda cluster: verify(cluster, load),
            attain=task.objectives.attain,
            simulations_max=simulations,
            is_slower=is_slower,
            on_tried=on_tried,
        )


def _headroom(task: PlanTask, found: Found, console: Console) -> float | None:
    """Return how many times the rate the best cluster still serves, as far as was looked."""
    if found.best is None:
        return None
    reached = task.headroom
    for step in (step for step in HEADROOM_STEPS if step > task.headroom):
        with console.status(f"headroom: {step:g} times the rate"):
            verdict = verify(found.best.plan, task.load_at(step))
        if verdict.aborted or verdict.met < task.objectives.attain:
            break
        reached = step
    return reached


def _publish(done: PlanResult, *, values: Path | None, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps(done.as_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        show(done)
    best = done.found.best
    if values is not None and best is not None:
        comments = (
            *("Written by `baton plan`.", words(best.plan), f"for {done.purpose}"),
            "model.path is the name that was planned with: set the folder or hub id to load.",
        )
        slo = {"ttft_s": done.objectives.ttft_s, "tpot_s": done.objectives.tpot_s}
        write_file(values, helm_values(best.plan, model=done.model, slo=slo, comments=comments).encode())
