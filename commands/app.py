"""The command line. The help of each command says what it does and shows an example."""

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.core.errors import SetupError
from baton.core.shape import CountedShape
from commands.certs import app as certs_app
from commands.experts import app as experts_app
from commands.keys import app as keys_app
from commands.operate import mount as mount_operations
from commands.orders import Control
from commands.parts import PASS_ON, run_part
from commands.store import app as store_app
from commands.tokens import app as tokens_app

app = typer.Typer(
    name="baton",
    help="LLM serving with prefill and decode on separate workers, and a KV cache that moves between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting of `baton config`; repeatable."),
]
Model = Annotated[str | None, typer.Option(help="Hugging Face folder, hub id, or GGUF file.")]
Models = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File that lists several models (YAML, TOML or JSON); replaces --model.",
        show_default=False,
    ),
]
Name = Annotated[str | None, typer.Option(help="Model name that clients use; default: the folder's name.")]
DType = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="Torch device: cpu, cuda, cuda:1 …")]
Host = Annotated[str | None, typer.Option(help="Interface that the public API listens on.")]
Port = Annotated[int | None, typer.Option(help="Port of the public API; 0: any free one.")]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis that holds the directory of KV blocks (redis://, rediss://, unix://, redis+sentinel://, "
        "redis+cluster://); default: the control plane holds it. Put a URL with a password into the "
        "environment instead: BATON_STORE__DIRECTORY.",
        show_default=False,
    ),
]


def _counted(text: str) -> str:
    try:
        CountedShape.parse(text)
    except SetupError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _workers(help_text: str) -> Any:
    return typer.Option(parser=_counted, metavar="N[xSHAPE]", help=help_text)


Prefill = Annotated[
    str | None,
    _workers("Prefill workers: 2, or 2xtp2 for two workers of two tensor ranks each (see engine.shape)."),
]
Decode = Annotated[str | None, _workers("Decode workers.")]
Aggregated = Annotated[
    str | None, _workers("Workers that run both phases; given alone, they replace the two pools.")
]

ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="The workers of a pool divide a model's routed experts: an expert rank stands beside every "
        "worker (experts.parallel=workers).",
    ),
]
Experts = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="A model's routed experts are on N expert ranks of each pool, apart from the workers "
        "(experts.parallel=ranks). See also `baton experts`.",
    ),
]


def _experts(is_parallel: bool, ranks: int | None) -> dict[str, str | int | None]:
    """Where experts are. Raises SetupError."""
    if is_parallel and ranks is not None:
        raise SetupError(
            "--expert-parallel puts expert ranks beside the workers, and --experts N apart from them: leave "
            "one of the two out"
        )
    if is_parallel:
        return {"experts.parallel": "workers"}
    return {} if ranks is None else {"experts.parallel": "ranks", "experts.ranks": ranks}


def _pools(prefill: str | None, decode: str | None, aggregated: str | None) -> dict[str, str | None]:
    """Worker counts of the three roles. `--aggregated 2` alone means two workers, not two beside the default
    pools."""
    if aggregated and CountedShape.parse(aggregated).count and prefill is None and decode is None:
        prefill = decode = "0"
    return {
        "cluster.prefill_workers": prefill,
        "cluster.decode_workers": decode,
        "cluster.aggregated_workers": aggregated,
    }


@app.command()
def serve(
    model_path: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    model: Model = None,
    name: Name = None,
    models: Models = None,
    host: Host = None,
    port: Port = None,
    prefill: Prefill = None,
    decode: Decode = None,
    aggregated: Aggregated = None,
    expert_parallel: ExpertParallel = False,
    experts: Experts = None,
    routers: Annotated[int | None, typer.Option(min=1, help="Router processes that share the port.")] = None,
    dtype: DType = None,
    device: Device = None,
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one.")] = None,
    store: Store = None,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start a whole cluster: control plane, workers and router.

    Ctrl-C drains the cluster; a second Ctrl-C stops it at once.

    Example: baton serve Qwen/Qwen3-0.6B --prefill 2 --decode 2 --set transfer.lease_s=10

    Example: baton serve --model Qwen/Qwen3-8B --prefill 2xtp2 --decode 1

    Example: baton serve --model Qwen/Qwen3-30B-A3B --aggregated 2 --expert-parallel
    """
    from commands.serve import serve_cluster
    from commands.settings import load_config

    if model_path is not None and model not in (None, model_path):
        raise SetupError(f"the model is named twice, {model_path} and {model}: leave one of them out")
    flags = {
        "model.path": model or model_path,
        "model.name": name,
        "model.dtype": dtype,
        "model.device": device,
        "router.host": host,
        "router.port": port,
        "router.processes": routers,
        **_pools(prefill, decode, aggregated),
        **_experts(expert_parallel, experts),
        "cluster.ray_address": ray_address,
        "store.directory": store,
    }
    serve_cluster(load_config(sets, flags, models=models), with_router=True)


@app.command()
def control(
    model: Model = None,
    models: Models = None,
    prefill: Prefill = None,
    decode: Decode = None,
    aggregated: Aggregated = None,
    expert_parallel: ExpertParallel = False,
    experts: Experts = None,
    port: Annotated[int | None, typer.Option(help="Port that the control plane listens on.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one.")] = None,
    store: Store = None,
    only: Annotated[
        bool,
        typer.Option(
            "--only",
            help="Start only the control plane, on a running Ray cluster. If it is killed and restarted at "
            "the same port, it keeps its workers.",
        ),
    ] = False,
    exit_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
    local_ray: Annotated[bool, typer.Option(hidden=True)] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start the control plane and workers without a router.

    Routers join with `baton router --control`.

    Example: baton control --model Qwen/Qwen3-0.6B --prefill 1 --decode 1 --port 7000
    """
    from commands.serve import serve_cluster, serve_control
    from commands.settings import load_config

    flags = {
        "model.path": model,
        **_pools(prefill, decode, aggregated),
        **_experts(expert_parallel, experts),
        "cluster.control_port": port,
        "cluster.ray_address": ray_address,
        "store.directory": store,
    }
    config = load_config(sets, flags, models=models)
    if only:
        serve_control(config, is_local=local_ray, exit_with_parent=exit_with_parent)
    else:
        serve_cluster(config, with_router=False)


@app.command()
def dashboard(
    control: Annotated[str, typer.Option(help="host:port of the control plane to show.")],
    host: Annotated[str | None, typer.Option(help="Interface that it listens on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one.")] = None,
    exit_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start one more dashboard.

    The control plane starts one itself unless dashboard.enabled is false.

    Example: baton dashboard --control 127.0.0.1:7000 --port 8071 --set access.tokens=tokens.txt
    """
    from commands.serve import serve_dashboard
    from commands.settings import load_config

    flags = {"dashboard.host": host, "dashboard.port": port}
    config = load_config(sets, flags)
    serve_dashboard(config, control_address=control, exit_with_parent=exit_with_parent)


@app.command()
def router(
    model: Model = None,
    name: Name = None,
    models: Models = None,
    control: Annotated[str, typer.Option(help="host:port of the control plane to follow.")] = "",
    worker: Annotated[list[str], typer.Option(help="host:port of a worker; repeatable.")] = [],  # noqa: B006
    host: Host = None,
    port: Port = None,
    exit_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start one router, which serves the public API.

    It follows a control plane, which lists the workers, or uses the workers that you name.

    Example: baton router --model Qwen/Qwen3-0.6B --control 127.0.0.1:7000 --port 8000
    """
    from commands.serve import serve_router
    from commands.settings import load_config

    flags = {"model.path": model, "model.name": name, "router.host": host, "router.port": port}
    config = load_config(sets, flags, models=models)
    serve_router(config, control_address=control, workers=worker, exit_with_parent=exit_with_parent)


@app.command()
def worker(
    model: Model = None,
    name: Name = None,
    role: Annotated[str, typer.Option(help="prefill, decode or aggregated.")] = "aggregated",
    replica: Annotated[str, typer.Option(help="Stable name of this worker; default: its role.")] = "",
    control: Annotated[str, typer.Option(help="host:port of the control plane to join.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="gRPC port; 0: any free one.")] = 0,
    dtype: DType = None,
    device: Device = None,
    store: Store = None,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Start one worker, without Ray.

    SIGTERM drains it. It prints `ready HOST:PORT` once it serves.

    Example: baton worker --model Qwen/Qwen3-0.6B --role prefill --control 127.0.0.1:7000
    """
    from commands.serve import serve_worker
    from commands.settings import load_config

    flags = {
        "model.path": model,
        "model.name": name,
        "model.dtype": dtype,
        "model.device": device,
        "store.directory": store,
    }
    config = load_config(sets, flags)
    serve_worker(config, role_name=role, replica=replica, control_address=control, port=port)


@app.command()
def doctor(
    url: Annotated[str, typer.Option(help="The router's URL.")] = "http://127.0.0.1:8000",
    control: Control = "",
    key: Annotated[
        str,
        typer.Option(envvar="OPENAI_API_KEY", help="API key for the test request.", show_default=False),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Do not check the router's certificate, which seldom has its name inside a cluster.",
        ),
    ] = False,
) -> None:
    """Check that every part is present, compatible and really in use.

    The control plane knows the expert ranks. Where there are any, a short request to each of their models
    proves that rows travel. The exit status is 1 if a check fails.

    Example: baton doctor --url http://127.0.0.1:8000
    """
    from commands.doctor import examine

    raise typer.Exit(examine(url, control=control, key=key, verify=not insecure))


@app.command()
def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema.")] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """List every setting with its value, its type and bounds, and its documentation.

    Example: baton config --set transfer.lease_s=10
    """
    from commands.show_config import show

    show(sets, as_schema=schema)


mount_operations(app)
app.add_typer(experts_app, name="experts")
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(certs_app, name="certs")
app.add_typer(tokens_app, name="tokens")


def _mount(name: str, module: str, needs: str, summary: str, example: str) -> None:
    """Add a command that another package implements. That package is imported when the command runs or shows
    its help."""

    def command(context: typer.Context) -> None:
        run_part(name, module, extra=needs, example=example, args=context.args)

    command.__doc__ = f"{summary}\n\nExample: {example}"
    app.command(name, context_settings=PASS_ON, add_help_option=False)(command)


_mount(
    "sim",
    "simulator.faults.cli",
    "",
    "Fault simulator: the production decisions under virtual time, with seeded faults.",
    "baton sim --seeds 100",
)
_mount(
    "simulate",
    "commands.simulate",
    "worker",
    "Fleet simulator: a production trace on a modelled GPU cluster, with the production router.",
    "baton simulate trace.jsonl --model llama-3-70b --gpu h100 --tp 4 --prefill 8 --decode 8",
)
_mount(
    "plan",
    "simulator.plan.cli",
    "worker",
    "Find the cheapest cluster that serves a trace within its SLOs.",
    "baton plan trace.jsonl --model llama-3-70b --gpu h100=2.99 --ttft-slo 5 --tpot-slo 0.05",
)
_mount(
    "replay",
    "loadgen.cli",
    "",
    "Replay a production trace against a server, open loop, and report goodput under SLOs.",
    "baton replay trace.jsonl --url http://127.0.0.1:8000",
)
_mount(
    "synth",
    "loadgen.synth.cli",
    "",
    "Generate synthetic traces that resemble a production trace, and measure how alike they are.",
    "baton synth mooncake-conversation --requests 5000 --out trace.jsonl",
)
_mount(
    "compare",
    "loadgen.compare",
    "",
    "Compare the reports of several runs: tables, JSON, one HTML page.",
    "baton compare baton.json vllm.json --html compared.html",
)
_mount(
    "bench",
    "commands.bench",
    "worker",
    "Measure parts of Baton against their limits and baselines.",
    "baton bench handover",
)
_mount(
    "chaos",
    "benchmarks.chaos.cli",
    "worker",
    "Drill: a real cluster of three hosts on this machine, under seeded faults; every answer is checked.",
    "baton chaos --minutes 30 --seed 7",
)
_mount(
    "demo-model",
    "benchmarks.demo_model.make",
    "worker",
    "Train the small demo model on this machine; nothing is downloaded.",
    "baton demo-model models/baton-demo",
)
_mount(
    "fetch-model",
    "commands.fetch_model",
    "",
    "Fetch the small instruct model that `make serve` serves.",
    "baton fetch-model models/SmolLM2-135M-Instruct.gguf",
)
