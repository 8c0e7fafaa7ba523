"""`baton plan`: the cheapest cluster for a trace, by search over the simulator."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.core.errors import SetupError
from baton.sim.hardware import ModelShape, find_model
from baton.sim.plan.search import ClusterPlan, Found, Tried, first_plans, search
from baton.sim.plan.shapes import EngineSize, Objectives, options, parse_prices, shapes
from baton.sim.plan.values import helm_values
from baton.sim.plan.verify import verify
from baton.terminal import new_console
from loadgen.lengths import Plan, Scaling, make_plan, parse_factor, time_scale_for
from loadgen.sources import open_trace
from loadgen.traces import Trace, cut

HEADROOM_STEPS = (1.1, 1.25, 1.5, 1.75, 2.0)

_Trace = Annotated[str, typer.Argument(help="Any trace that `baton replay` takes, or synth:NAME.")]
_Model = Annotated[
    str, typer.Option(help="A known name (llama-3-70b …), a Hugging Face folder or config.json.")
]
_Gpus = Annotated[
    list[str], typer.Option("--gpu", metavar="NAME=PRICE", help="GPU offered, dollars per hour; repeatable.")
]
_Ttft = Annotated[float, typer.Option(min=0.001, help="Objective for the first token, seconds.")]
_Tpot = Annotated[float, typer.Option(min=0.0001, help="Objective per token after the first, seconds.")]
_Attain = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet both.")]
_Rate = Annotated[float | None, typer.Option(min=0.0001, help="Requests per second; default: the trace's.")]
_Headroom = Annotated[float, typer.Option(min=1.0, help="Plan for so many times the rate.")]
_Widths = Annotated[str, typer.Option(metavar="N,N…", help="Tensor-parallel widths to try.")]
_Stages = Annotated[str, typer.Option(metavar="N,N…", help="Pipeline stages to try.")]
_Weights = Annotated[float, typer.Option(min=0.25, max=4, help="Bytes per weight: 2 bf16, 1 fp8 or int8.")]
_LengthScale = Annotated[str, typer.Option(help="Factor for input and output lengths.")]
_Limit = Annotated[int, typer.Option(min=50, help="Requests of the trace that each simulation runs.")]
_Simulations = Annotated[int, typer.Option(min=1, help="Clusters that are simulated, at most.")]
_Values = Annotated[Path | None, typer.Option(help="Write Helm values there.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@dataclass(frozen=True, slots=True)
class Task:
    """What to plan for."""

    model: ModelShape
    trace: Trace
    scaling: Scaling
    rate: float
    headroom: float
    objectives: Objectives
    size: EngineSize

    def plan_at(self, factor: float) -> Plan:
        """The requests, at `factor` times the rate."""
        scale = time_scale_for(self.trace, self.rate * factor)
        scaling = Scaling(self.scaling.input_scale, self.scaling.output_scale, scale)
        return make_plan(self.trace, scaling, spread=True, seed=0)

    def passes(self, cluster: ClusterPlan, factor: float) -> bool:
        verdict = verify(cluster, self.plan_at(factor), self.objectives, self.size)
        return verdict.met >= self.objectives.attain


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
    simulations: _Simulations = 24,
    values: _Values = None,
    json: _Json = False,
) -> None:
    """Find the cheapest cluster (shapes, pools, replicas) that serves a trace within its objectives.

    Each shape is measured alone, then clusters are simulated, cheapest first, with the production router.

    Example: baton plan conversation.jsonl --model llama-3-8b --gpu h100=2.99 --gpu a100=1.79 --ttft-slo 5
    --tpot-slo 0.05 --rate 10 --tensor 1 --pipeline 1 --values plan.yaml
    """
    console = Console(stderr=True)
    try:
        taken = cut(open_trace(trace, requests=limit), limit=limit)
        factor = parse_factor(length_scale)
        span_s = taken.requests[-1].at_s - taken.requests[0].at_s
        task = Task(
            model=find_model(model),
            trace=taken,
            scaling=Scaling(factor, factor),
            rate=rate or (len(taken.requests) - 1) / max(span_s, 1e-9),
            headroom=headroom,
            objectives=Objectives(ttft_slo, tpot_slo, attain),
            size=EngineSize(chunk_tokens=2048, batch_max=256),
        )
        prices = parse_prices(gpus)
        found = _search(
            task, prices, _numbers(tensor), _numbers(pipeline), weight_bytes, simulations, console
        )
        reached = _headroom(task, found, console)
        _publish(task, found, reached, values=values, as_json=json)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    if found.best is None:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SetupError(f"{text!r} is not a list of widths such as 1,2,4")
    return numbers


def _search(
    task: Task, prices: dict[str, float], tensors: list[int], pipelines: list[int],
    weight_bytes: float, simulations: int, console: Console,
) -> Found:  # fmt: skip
    listed = shapes(task.model, prices, tensors=tensors, pipelines=pipelines, weight_bytes=weight_bytes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    asked = task.plan_at(task.headroom)
    with Progress(*columns, console=console) as progress:
        alone = progress.add_task("shapes alone", total=len(listed))
        rated = list(
            options(
                asked, listed, task.objectives, task.size,
                mean_rate=task.rate * task.headroom, on_done=lambda: progress.advance(alone),
            )
        )  # fmt: skip
        whole = progress.add_task("clusters simulated", total=simulations)

        def on_tried(one: Tried) -> None:
            progress.advance(whole)
            mark = "yes" if one.passed else f"{one.verdict.met:.0%}"
            progress.console.print(f"  {mark:>4}  {_words(one.plan)}", highlight=False, soft_wrap=True)

        return search(
            first_plans(rated, rate=task.rate * task.headroom),
            lambda cluster: verify(cluster, asked, task.objectives, task.size),
            attain=task.objectives.attain,
            simulations_max=simulations,
            on_tried=on_tried,
        )


def _headroom(task: Task, found: Found, console: Console) -> float | None:
    """How many times the rate the best cluster still serves, as far as was looked."""
    if found.best is None:
        return None
    reached = task.headroom
    for step in HEADROOM_STEPS:
        if step <= task.headroom:
            continue
        with console.status(f"headroom: {step:g} times the rate"):
            if not task.passes(found.best, step):
                break
        reached = step
    return reached


def _words(cluster: ClusterPlan) -> str:
    pools = (f"{role.value} {pool.count} of {pool.shape.name}" for role, pool in cluster.pools.items())
    return f"${cluster.price_per_hour:.2f}/h, {cluster.gpu_count} GPUs: " + ", ".join(pools)


def _publish(task: Task, found: Found, reached: float | None, *, values: Path | None, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(
            orjson.dumps(_as_json(task, found, reached), option=orjson.OPT_INDENT_2).decode() + "\n"
        )
    else:
        _show(task, found, reached)
    if values is not None and found.best is not None:
        comments = (
            *("Written by `baton plan`.", _words(found.best), f"for {_for_what(task)}"),
            "model.path is the name that was planned with: set the folder or hub id to load.",
        )
        slo = {"ttft_s": task.objectives.ttft_s, "tpot_s": task.objectives.tpot_s}
        try:
            values.write_text(helm_values(found.best, model=task.model.name, slo=slo, comments=comments))
        except OSError as error:
            raise SetupError(f"cannot write {values}: {error}") from None


def _for_what(task: Task) -> str:
    wanted = task.objectives
    return (
        f"{task.model.name} at {task.rate:.3g} requests/s times {task.headroom:g}: TTFT {wanted.ttft_s:g} s "
        f"and TPOT {wanted.tpot_s:g} s for {wanted.attain:.0%} of requests"
    )


def _show(task: Task, found: Found, reached: float | None) -> None:
    console = new_console()
    if found.best is None:
        console.print(f"[bold]Nothing that was tried serves[/bold] {_for_what(task)}.")
        if found.tried:
            nearest = max(found.tried, key=lambda one: one.verdict.met).verdict
            met, ttft_met, tpot_met = (f"{share:.0%}" for share in nearest)
            console.print(
                f"At best {met} met both objectives, {ttft_met} that of TTFT, {tpot_met} that of TPOT. Where "
                "more replicas change nothing, one of them is too slow."
            )
        console.print("Raise --simulations, loosen the objectives, or offer other GPUs or widths.")
        return
    table = Table(title=_for_what(task), title_justify="left")
    for name in ("", "pool", "replicas", "shape", "$/hour"):
        table.add_column(name, justify="right" if name in ("replicas", "$/hour") else "left")
    for title, cluster in (("cheapest", found.best), ("runner-up", found.runner_up)):
        if cluster is None:
            continue
        for role, pool in cluster.pools.items():
            price = f"{pool.price_per_hour:.2f}"
            table.add_row(title, role.value, str(pool.count), pool.shape.name, price)
        table.add_row("", "", "", "[bold]together[/bold]", f"{cluster.price_per_hour:.2f}", end_section=True)
    console.print(table)
    console.print(
        f"The cheapest still serves {reached:g} times the rate in the simulator; {len(found.tried)} tried."
    )
    if any(pool.shape.node.gpu_count > 1 for pool in found.best.pools.values()):
        console.print(
            "Note: this engine runs one GPU per worker; shapes of several are a plan for engines with tensor "
            "parallelism. --tensor 1 plans for what runs today."
        )


def _as_json(task: Task, found: Found, reached: float | None) -> dict[str, object]:
    def of(cluster: ClusterPlan | None) -> dict[str, object] | None:
        if cluster is None:
            return None
        pools = {
            role.value: {
                "replicas": pool.count,
                "gpu": pool.shape.node.gpu.name,
                "tensor": pool.shape.node.tensor,
                "pipeline": pool.shape.node.pipeline,
            }
            for role, pool in cluster.pools.items()
        }
        return {"price_per_hour": cluster.price_per_hour, "gpus": cluster.gpu_count, "pools": pools}

    return {
        "model": task.model.name,
        "rate_per_s": task.rate,
        "headroom_asked": task.headroom,
        "headroom_reached": reached,
        "objectives": asdict(task.objectives),
        "cheapest": of(found.best),
        "runner_up": of(found.runner_up),
        "tried": [
            {**(of(one.plan) or {}), "met": one.verdict.met, "passed": one.passed} for one in found.tried
        ],
    }
