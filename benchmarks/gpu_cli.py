"""`baton bench gpu`."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks import device as device_bench
from benchmarks import peers
from benchmarks.device import DeviceServer, DeviceStep
from benchmarks.device_model import SIZES, make_device_model
from benchmarks.peers import MODEL_NAME, Peer

CONTEXT_TOKENS = 8192


class DeviceReport(msgspec.Struct, frozen=True):
    device: str
    steps: list[DeviceStep]
    servers: list[DeviceServer]


def gpu(
    device: Annotated[str, typer.Option(help="The GPU: cuda, cuda:1 …")] = "cuda",
    size: Annotated[str, typer.Option(help="Random Llama that is made and measured: 1b or 8b.")] = "8b",
    folder: Annotated[
        str, typer.Option(help="Where the model is made, and kept; empty: a temporary folder.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds in which the servers take turns.")] = 2,
    peer: Annotated[
        list[str], typer.Option(metavar="vllm=PATH", help="Path of vLLM's program or environment.")
    ] = [],  # noqa: B006
    with_engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Measure the engine alone.")
    ] = True,
    with_servers: Annotated[
        bool, typer.Option("--servers/--no-servers", help="Compare whole servers.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare steps on a GPU with its limits, and servers on it with each other.

    The servers are Baton with one aggregated worker, Baton with a prefill and a decode worker that share the
    GPU, and vLLM where it is found. Each starts alone, on a device that nothing else uses.

    Example: baton bench gpu --peer vllm=~/vllm-env
    """
    notes = Console(stderr=True, highlight=False)
    if size not in SIZES:
        raise SetupError(f"--size {size}: choose one of {', '.join(SIZES)}")
    on = device_bench.device_of(device)
    if on.type != "cuda":
        raise SetupError(f"--device {device}: this is for GPUs; `baton bench engine` measures on a CPU")
    vllm = _vllm(peer)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        notes.print(f"making a random Llama of size {size}")
        model = make_device_model(Path(folder or temporary).expanduser() / f"bench-{size}", SIZES[size], on)
        steps: list[DeviceStep] = []
        if with_engine:
            steps = device_bench.measure_steps(model, device, SIZES[size], 5, notes.print)
        servers: list[DeviceServer] = []
        if with_servers:
            servers = device_bench.run_servers(
                _servers(model, device, vllm),
                rounds=rounds,
                vocab=SIZES[size].vocab,
                cores=sorted(os.sched_getaffinity(0)),
                progress=notes.print,
            )
    report = DeviceReport(device_bench.name_of(on), steps, servers)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    _show(report)


def _vllm(given: list[str]) -> str | None:
    for text in given:
        name, _, path = text.partition("=")
        if name != "vllm" or not path:
            raise SetupError(f"--peer {text}: write vllm=PATH")
        return peers.find_program("vllm", str(Path(path).expanduser()))
    return peers.find_program("vllm", None)


def _servers(model: Path, device: str, vllm: str | None) -> list[Peer]:
    found = [
        _baton("baton", model, device, "--aggregated", "1"),
        _baton("baton, split", model, device, "--prefill", "1", "--decode", "1"),
    ]
    if vllm is not None:
        options = ("--served-model-name", MODEL_NAME, "--max-model-len", str(CONTEXT_TOKENS))
        command = (vllm, "serve", str(model), *options, "--no-enable-prefix-caching", "--port", "{port}")
        found.append(Peer("vllm", command))
    return found


def _baton(name: str, model: Path, device: str, *workers: str) -> Peer:
    """A random model repeats itself, which makes speculation unrealistically good."""
    settings = (
        f"model.name={MODEL_NAME}",
        f"model.context_tokens_max={CONTEXT_TOKENS}",
        "engine.speculation=off",
    )
    sets = [part for value in settings for part in ("--set", value)]
    serve = (sys.executable, "-m", "baton", "serve", "--model", str(model), "--port", "{port}")
    return Peer(name, (*serve, "--device", device, *workers, *sets))


def _show(report: DeviceReport) -> None:
    console = new_console()
    if report.steps:
        table = Table(
            title=f"Steps on {report.device}; ratio: the limit's time to that of a step begun ahead"
        )
        for column in ("step", "alone ms", "ahead ms", "limit", "ms", "ratio"):
            table.add_column(column, justify="left" if column in ("step", "limit") else "right")
        for s in report.steps:
            times = (f"{s.alone_s * 1e3:.2f}", f"{s.ahead_s * 1e3:.2f}")
            table.add_row(s.name, *times, s.limit, f"{s.limit_s * 1e3:.2f}", f"{s.limit_s / s.ahead_s:.2f}")
        console.print(table)
    if report.servers:
        table = Table(title=f"Servers on {report.device}, medians over the rounds")
        for column in ("in flight", "tokens", "server", "tok/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms"):
            table.add_column(column, justify="right")
        for one in sorted(report.servers, key=lambda one: (one.prompt_tokens, one.load.concurrency)):
            load = one.load
            times = (load.ttft_p50_s, load.ttft_p99_s, load.tpot_p50_s, load.tpot_p99_s)
            table.add_row(
                str(load.concurrency),
                f"{one.prompt_tokens} → {one.output_tokens}",
                one.peer,
                f"{load.output_tokens_per_s:.0f}",
                *(f"{t * 1e3:.1f}" for t in times),
            )
        console.print(table)
