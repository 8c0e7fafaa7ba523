"""`baton bench` measures parts of Baton. The module of a benchmark is imported when that benchmark runs."""

import signal
from typing import NamedTuple

import typer

from baton.config import Config
from baton.wire.transport import secure
from commands.parts import PASS_ON, run_part
from control_plane.reaper import Reaper


class Benchmark(NamedTuple):
    """A benchmark; its module has a function of the same name."""

    name: str
    module: str
    summary: str


BENCHES = (
    Benchmark(
        "engine", "benchmarks.engine_cli", "The engine and `baton serve`, compared with other servers."
    ),
    Benchmark("gpu", "benchmarks.gpu_cli", "Steps and servers on a GPU, beside its limits and vLLM."),
    Benchmark("kernels", "benchmarks.kernels_cli", "Each kernel, compared with its hardware limit."),
    Benchmark(
        "products", "benchmarks.products_cli", "Products of quantised weights beside bf16's and torch's."
    ),
    Benchmark("parallel", "benchmarks.parallel.cli", "Workers of two ranks, compared with one on two cores."),
    Benchmark("experts", "benchmarks.experts.cli", "Placement of experts, compared with DeepSeek's EPLB."),
    Benchmark(
        "expert-layouts",
        "benchmarks.expert_nodes.cli",
        "Experts over nodes, beside published figures.",
    ),
    Benchmark(
        "node-loss", "benchmarks.expert_nodes.cli", "Goodput through a node's loss, by replicas of experts."
    ),
    Benchmark("quality", "benchmarks.quality_cli", "What quantisation costs in perplexity and agreement."),
    Benchmark("speculation", "benchmarks.speculation_cli", "Tokens per second with and without speculation."),
    Benchmark("transfer", "benchmarks.transfer_cli", "Reads between two processes, compared with raw NIXL."),
    Benchmark("handover", "benchmarks.handover_cli", "The hand-over from prefill to decode."),
    Benchmark("store", "benchmarks.store_cli", "Paths of the KV store, compared with memcpy and fio."),
    Benchmark("reuse", "benchmarks.reuse_cli", "TTFT of a repeated prompt, by the tier that holds its KV."),
    Benchmark("working-set", "benchmarks.working_set_cli", "Goodput with and without the KV store."),
    Benchmark(
        "store-cost", "benchmarks.working_set_cli", "The KV store's cost for traffic that never repeats."
    ),
    Benchmark("router", "benchmarks.router_cli", "The router's own cost per request."),
    Benchmark("goodput", "benchmarks.goodput_cli", "Goodput of Baton and of other servers."),
    Benchmark("fidelity", "benchmarks.fidelity_cli", "A live run, compared with a simulation of it."),
    Benchmark("faults", "benchmarks.faults_cli", "A replay during which nodes and processes are killed."),
    Benchmark("placement", "benchmarks.placement_cli", "Placement policies, in the fleet simulator."),
    Benchmark("hedging", "benchmarks.hedging_cli", "Backup attempts of requests, in the fleet simulator."),
    Benchmark("overload", "benchmarks.overload_cli", "Early rejection and fairness, in the fleet simulator."),
    Benchmark("autoscale", "benchmarks.autoscale_cli", "The autoscaler, in the fleet simulator."),
    Benchmark("policies", "benchmarks.eviction.cli", "Eviction policies of the KV store, on a trace."),
)

app = typer.Typer(name="bench", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure parts of Baton against their limits and baselines.

    Example: baton bench handover --model models/baton-demo
    """
    # SIGTERM ends a benchmark as Ctrl-C does, so that the processes it started are ended as well. It does not
    # raise SIGINT, because scripts start background jobs with SIGINT ignored.
    signal.signal(signal.SIGTERM, _interrupt)
    context.call_on_close(Reaper().close)  # the reaper ends these processes after a SIGKILL
    config = Config()  # reads the environment, like the processes that a benchmark starts
    secure(config.tls, config.access)


def _mount(one: Benchmark) -> None:
    def command(context: typer.Context) -> None:
        run_part(f"bench {one.name}", one.module, extra="worker", args=context.args)

    command.__doc__ = one.summary
    app.command(one.name, context_settings=PASS_ON, add_help_option=False)(command)


for one in BENCHES:
    _mount(one)
