"""`baton chaos`."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks.chaos import drill
from benchmarks.chaos.cluster import DrillClusterPlan
from benchmarks.chaos.drill import DrillPlan
from benchmarks.chaos.model import kinds_for, make_default, vocabulary
from benchmarks.chaos.namespaces import check_namespaces, enter, is_inside
from benchmarks.chaos.requests import DrillRequest, asks
from benchmarks.chaos.schedule import Event, FaultKind, draw
from benchmarks.chaos.show import show_result, show_schedule
from loadgen.options import TrafficOptions
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.traffic import traffic_of

DEMO_TRAINING_S = 20.0
VOCAB_MAX = 2000
INTERRUPTED_STATUS = 130
DEFAULT_TRACE = "synth:mooncake-conversation"


Model = Annotated[
    str, typer.Option(help="Hugging Face folder of a small model; default: the demo model, trained for 20 s.")
]
Seed = Annotated[int, typer.Option(help="Seed of the schedule and of the requests; default: a new one.")]
FaultNames = Annotated[
    str, typer.Option(metavar="NAME,NAME", help=f"Kinds of faults; default: all of {', '.join(FaultKind)}.")
]
Folder = Annotated[
    Path | None, typer.Option(help="New folder for logs and report; default: a temporary one.")
]


def chaos(
    model: Model = "",
    minutes: Annotated[float, typer.Option(min=0.5, max=1440, help="Length of the replay.")] = 30.0,
    seed: Seed = -1,
    every: Annotated[float, typer.Option(min=1, help="Mean seconds between two faults.")] = 15.0,
    faults: FaultNames = "",
    trace: Annotated[str, typer.Option(help="Trace as for `baton replay`.")] = DEFAULT_TRACE,
    rate: Annotated[float, typer.Option(min=0.1, help="Mean requests per second.")] = 2.0,
    length_scale: Annotated[str, typer.Option(help="Factor for the trace's prompts.")] = "1/64",
    output_scale: Annotated[str, typer.Option(help="Factor for the trace's answers.")] = "1",
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    first_token: Annotated[int, typer.Option(min=0, help="Lowest token id to send.")] = 300,
    prefill: Annotated[int, typer.Option(min=1)] = 3,
    decode: Annotated[int, typer.Option(min=1)] = 3,
    sets: Annotated[list[str], typer.Option("--set", metavar="SECTION.FIELD=VALUE")] = [],  # noqa: B006
    folder: Folder = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the schedule and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replay a trace on a real cluster of three hosts while a seeded schedule of faults strikes it.

    The hosts are namespaces of this machine, with two routers, prefill and decode workers, two store nodes,
    Redis, control plane and dashboard on them. Processes are killed and frozen, hosts are lost, links are cut
    and slowed, disks fill, clocks step, Redis forgets, and operators drain, switch and upgrade workers. Every
    answer is compared with that of an undisturbed run; every request must end; nothing may be held, missing,
    left behind or grow at the end. The exit status is 1 if a check fails, and the logs are then kept in the
    folder that is named.

    It needs Linux, root or user namespaces, `ip` and `tc`, and `redis-server`. It touches nothing outside its
    own namespaces, and they end with it.

    Example: baton chaos --minutes 30 --seed 7
    """
    chosen = _faults(faults)
    seed = seed if seed >= 0 else int(time.time()) % 100_000
    events = draw(seed, length_s=60 * minutes, every_s=every, faults=chosen)
    if dry_run:
        _print_schedule(seed, events, as_json=as_json)
        return
    if not is_inside():
        raise typer.Exit(_in_namespaces(folder, seed))
    assert folder is not None, "the process outside made it"
    notes = Console(stderr=True, highlight=False)
    notes.print(f"seed {seed}: {len(events)} faults in {minutes:g} minutes")
    traffic = TrafficOptions(
        trace,
        limit=max(1, round(60 * minutes * rate)),
        rate=rate,
        length_scale=length_scale,
        output_scale=output_scale,
        max_output=max_output,
        seed=seed,
    )
    path = model or _demo_model(folder, notes)
    requests = _requests(traffic, path, first_token=first_token)
    plan = DrillPlan(DrillClusterPlan(path, prefill, decode, tuple(sets)), seed, events, requests)
    _drill(plan, folder, notes, as_json=as_json)


def _drill(plan: DrillPlan, folder: Path, notes: Console, *, as_json: bool) -> None:
    """Run it, write and show what became of it, and end with its exit status. Raises SetupError."""
    (folder / "schedule.json").write_bytes(_json(plan.events))
    result = asyncio.run(
        drill.run(plan, folder=folder, progress=lambda text: notes.print(text, markup=False))
    )
    (folder / "report.json").write_bytes(_json(result))
    if as_json:
        sys.stdout.write(_json(result).decode() + "\n")
    else:
        show_result(new_console(), result)
    if result.findings:
        count = len(result.findings)
        text = f"{count} findings; repeat with --seed {plan.seed}; logs and report are in {folder}"
        typer.echo(f"baton: {text}", err=True)
        raise typer.Exit(1)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))


def _faults(text: str) -> tuple[FaultKind, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in list(FaultKind)]
    if wrong:
        raise SetupError(f"--faults {', '.join(wrong)}: not a fault; choose among {', '.join(FaultKind)}")
    return tuple(FaultKind(name) for name in names) or tuple(FaultKind)


def _print_schedule(seed: int, events: Sequence[Event], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(_json({"seed": seed, "events": events}).decode() + "\n")
    else:
        show_schedule(new_console(), seed, events)


def _in_namespaces(folder: Path | None, seed: int) -> int:
    """Run this command line again inside, and return its exit status. A folder of our own is kept only if a
    drill ended badly. Raises SetupError."""
    check_namespaces()
    if folder is None:
        place = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    else:
        place = folder.absolute()
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise SetupError(f"--folder {folder}: {error.strerror}: name one that does not exist") from None
    more = ("--folder", str(place), "--seed", str(seed))
    status = enter([sys.executable, "-m", "baton", *sys.argv[1:], *more])
    if folder is None and status in (0, INTERRUPTED_STATUS):
        shutil.rmtree(place, ignore_errors=True)
    return status


def _demo_model(folder: Path, notes: Console) -> str:
    notes.print(f"the demo model is trained for {DEMO_TRAINING_S:g} s; name another with --model")
    make_default(folder / "demo", budget_s=DEMO_TRAINING_S)
    return str(folder / "demo")


def _requests(traffic: TrafficOptions, model: str, *, first_token: int) -> tuple[DrillRequest, ...]:
    """Raises SetupError."""
    vocab = vocabulary(Path(model))
    plan = traffic_of(traffic).plan()
    prompts = PromptMaker(plan, TokenRange(first_token, min(vocab, VOCAB_MAX)), seed=traffic.seed)
    return tuple(asks(plan, prompts, kinds_for(Path(model)), model=Path(model).name, seed=traffic.seed))
