"""`baton bench engine`."""

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.files.terminal import new_console
from benchmarks import engine as engine_bench
from benchmarks import peers, servers
from benchmarks.bench_model import make_bench_model, write_gguf
from benchmarks.engine import EngineResult, Sizes
from benchmarks.peers import Peer
from benchmarks.servers import ServerResult
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import resolve_model
from engine.model_files.sizes import kv_geometry

SLOT_TOKENS = 1024
"""Context of one of llama.cpp's slots."""
CONTEXT_TOKENS_MAX = 1024
"""Context of the sequences that decode, since the KV pool has to hold the largest batch."""
PEERS = ("vllm", "llama-server", "transformers")
PLAIN = "engine.speculation=off"
"""A random model repeats itself, which makes speculation unrealistically good, and other servers do not
speculate."""


class EngineReport(msgspec.Struct, frozen=True):
    engine: list[EngineResult]
    servers: list[ServerResult]


ModelOption = Annotated[
    str,
    typer.Option(
        help="Hugging Face folder or GGUF file, which llama.cpp then serves too; empty: a random 82 M Llama "
        "in bf16.",
        show_default=False,
    ),
]
TensorOption = Annotated[
    int,
    typer.Option(min=1, max=64, help="Compare servers of so many tensor ranks, each with a core, instead."),
]
PeerOption = Annotated[
    list[str],
    typer.Option(metavar="NAME=PATH", help=f"Path of the program or environment of {', '.join(PEERS)}."),
]
RestartsOption = Annotated[
    bool,
    typer.Option(
        "--restarts",
        help="Start each server anew for its turn, if memory does not hold all of them at once.",
    ),
]
TransformersOption = Annotated[
    bool,
    typer.Option("--transformers", help="Have transformers compute the prompt too, in turn."),
]
DTYPES = ("bfloat16", "float32")
PeerDtypeOption = Annotated[
    str,
    typer.Option(
        help=f"Number type of vLLM and transformers: {' or '.join(DTYPES)}. Processors without instructions "
        "for bfloat16 compute prompts faster in float32.",
    ),
]

TpotOption = Annotated[
    float,
    typer.Option(
        min=0.0, max=60.0, help="Measure Baton's server once more with this engine.tpot_slo_s; 0: do not."
    ),
]


def engine(
    model: ModelOption = "",
    threads: Annotated[
        str, typer.Option(help="Numbers of cores to measure with, separated by commas.")
    ] = "1",
    quantization: Annotated[str, typer.Option(help="Weights to measure: none, int8, int4.")] = "none,int8",
    concurrency: Annotated[str, typer.Option(help="Requests in flight at the servers.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds in which the servers take turns.")] = 3,
    restarts: RestartsOption = False,
    tensor: TensorOption = 1,
    tpot_slo_s: TpotOption = 0.0,
    peer: PeerOption = [],  # noqa: B006
    peer_dtype: PeerDtypeOption = "bfloat16",
    with_servers: Annotated[
        bool, typer.Option("--servers/--no-servers", help="Compare whole servers.")
    ] = True,
    with_engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Measure the engine alone.")
    ] = True,
    with_transformers: TransformersOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare the engine with bare matrix products and memory reads, and `baton serve` with other servers.

    Other servers are found on PATH or named with --peer. All run on the same cores, in turn: they are in
    memory together, and all but one are paused. Ctrl-C ends the comparison: what was measured is shown.

    Example: baton bench engine --threads 1,2 --peer vllm=~/vllm-env --peer llama-server=~/llama.cpp/build
    """
    notes = Console(stderr=True, highlight=False)
    counts = _core_counts(threads, tensor, with_engine=with_engine)
    kinds = quantization.split(",")
    loads = _numbers("--concurrency", concurrency)
    _check(kinds, peer, peer_dtype, with_servers=with_servers, with_engine=with_engine)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = Path(model).expanduser() if model else make_bench_model(_cache(temporary))
        engines: list[EngineResult] = []
        if with_engine:
            sizes = _sizes(prompt_tokens, transformers_dtype=peer_dtype if with_transformers else "")
            engines = [_measure(folder, n, kind, sizes, notes) for n in counts for kind in kinds]
        if not as_json:
            _show_engine(engines)
        measured = servers.MeasuredLoads()
        try:
            if with_servers:
                slots = Slots(max(loads), max(SLOT_TOKENS, prompt_tokens + output_tokens))
                comparison = servers.ServerComparison(
                    servers.loads_of(loads, prompt_tokens, output_tokens), rounds, not restarts, notes.print
                )
                others = Others(not model, tensor, peer_dtype)
                found = peers_of(folder, kinds, peer, slots, others, tpot_slo_s=tpot_slo_s)
                servers.run(found, comparison, core_counts=counts, measured=measured)
        finally:  # an interrupted run has taken minutes: it shows what they brought
            if as_json:
                _print_json(EngineReport(engines, measured.results()))
            elif with_servers:
                _show_servers(measured.results())


def _print_json(report: EngineReport) -> None:
    print(msgspec.json.format(msgspec.json.encode(report)).decode())


def _cache(temporary: str) -> Path:
    return Path(temporary) / "bench-82m"


def _numbers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise SetupError(f"{option} {text}: write whole numbers of at least 1, separated by commas")
    return values


def _core_counts(threads: str, tensor: int, *, with_engine: bool) -> list[int]:
    if tensor > 1 and with_engine:
        raise SetupError("--tensor compares servers: add --no-engine, and see `baton bench parallel`")
    counts = [tensor] if tensor > 1 else _numbers("--threads", threads)
    here = len(os.sched_getaffinity(0))
    if max(counts) > here:
        raise SetupError(f"{max(counts)} cores are asked for, and {here} are at hand")
    return counts


def _check(
    kinds: Sequence[str], peer: Sequence[str], dtype: str, *, with_servers: bool, with_engine: bool
) -> None:
    """Check what would show only after minutes. Raises SetupError."""
    if dtype not in DTYPES:
        raise SetupError(f"--peer-dtype {dtype}: choose {' or '.join(DTYPES)}")
    if not with_servers and not with_engine:
        raise SetupError("nothing to measure: leave out --no-servers or --no-engine")
    for kind in kinds:
        _model_config(Path(), kind)
    for text in peer:
        peers.find_program(*_peer(text))


def _peer(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise SetupError(f"--peer {text}: write NAME=PATH, where NAME is one of {', '.join(PEERS)}")
    return name, str(Path(path).expanduser())


def _sizes(prompt_tokens: int, *, transformers_dtype: str) -> Sizes:
    """Return the sizes for prompts of this length. Long ones take seconds each, so they have fewer rounds."""
    rounds = max(3, min(Sizes().rounds, Sizes().rounds * 512 // prompt_tokens))
    return Sizes(
        prompt_tokens,
        min(prompt_tokens, CONTEXT_TOKENS_MAX),
        rounds=rounds,
        transformers_dtype=transformers_dtype,
    )


def _measure(folder: Path, threads: int, kind: str, sizes: Sizes, notes: Console) -> EngineResult:
    model = _model_config(folder, kind)
    settings = EngineConfig(threads=threads, step_tokens_max=max(sizes.prefill_tokens, 512))
    geometry = kv_geometry(load_spec(resolve_model(model.path)), model, settings)
    blocks = max(
        geometry.blocks_for(sizes.prefill_tokens),
        max(sizes.batches) * geometry.blocks_for(sizes.context_tokens),
    )
    settings = settings.model_copy(update={"kv_bytes": blocks * geometry.block_bytes})
    return engine_bench.measure(model, settings, sizes, progress=notes.print)


def _model_config(folder: Path, kind: str) -> ModelConfig:
    """Raises SetupError for an unknown quantisation."""
    try:
        return ModelConfig.model_validate({"path": str(folder), "quantization": kind})
    except ValueError:
        raise SetupError(f"--quantization {kind}: choose none, int8 or int4") from None


class Slots(msgspec.Struct, frozen=True):
    """How many requests llama.cpp takes at once, and the tokens of each."""

    count: int
    tokens: int


class Others(msgspec.Struct, frozen=True):
    """How other servers run: whether the model is ours, so that files are written for them; tensor ranks; the
    number type of vLLM and transformers."""

    own_model: bool
    tensor: int = 1
    dtype: str = "bfloat16"


def peers_of(
    folder: Path, kinds: list[str], peer: list[str], slots: Slots, others: Others, *, tpot_slo_s: float = 0.0
) -> list[Peer]:
    given = dict(_peer(text) for text in peer)
    tensor, dtype = others.tensor, others.dtype
    steady = _with_objective(folder, tensor, tpot_slo_s) if tpot_slo_s else []
    if tensor > 1:
        return [*steady, *_servers_of_ranks(folder, given, tensor, dtype)]
    found = [
        *steady,
        peers.baton_peer(folder, settings=[PLAIN]),
        peers.baton_peer(folder, name="baton, speculation"),
    ]
    if "int8" in kinds:
        int8 = ["model.quantization=int8", PLAIN]
        found.append(peers.baton_peer(folder, name="baton int8", settings=int8))
    is_gguf = folder.suffix == ".gguf"
    if (program := peers.find_program("vllm", given.get("vllm"))) and not is_gguf:
        found.append(peers.vllm_peer(program, folder, dtype=dtype))
    if program := peers.find_program("llama-server", given.get("llama-server")):
        files = {"llama.cpp": folder} if is_gguf else {}
        if others.own_model:
            files = {
                f"llama.cpp {kind}": write_gguf(folder, kind)
                for kind in ("bf16", *(["q8_0"] if "int8" in kinds else []))
            }
        for name, gguf in files.items():
            found.append(
                peers.llama_cpp_peer(program, gguf, name=name, slots=slots.count, slot_tokens=slots.tokens)
            )
    if is_gguf:
        return found
    own = shutil.which("transformers") if given.get("transformers") is None else None
    if program := own or peers.find_program("transformers", given.get("transformers")):
        found.append(peers.transformers_peer(program, folder, dtype=dtype))
    return found


def _with_objective(folder: Path, tensor: int, tpot_slo_s: float) -> list[Peer]:
    name = "baton" if tensor == 1 else f"baton tp{tensor}"
    settings = [PLAIN, f"engine.tpot_slo_s={tpot_slo_s}"]
    name = f"{name}, TPOT {tpot_slo_s * 1e3:.0f} ms"
    return [peers.baton_peer(folder, name=name, settings=settings, tensor=tensor)]


def _servers_of_ranks(folder: Path, given: dict[str, str], tensor: int, dtype: str) -> list[Peer]:
    """Only vLLM among the peers has tensor ranks on a CPU."""
    ranks = peers.baton_peer(folder, name=f"baton tp{tensor}", settings=[PLAIN], tensor=tensor)
    found = [peers.baton_peer(folder, settings=[PLAIN]), ranks]
    if program := peers.find_program("vllm", given.get("vllm")):
        found.append(peers.vllm_peer(program, folder, tensor=tensor, dtype=dtype))
    return found


def _show_engine(results: list[EngineResult]) -> None:
    if not results:
        return
    prefill = Table(title="Prefill alone, and the same matrix products by torch")
    columns = ("threads", "weights", "kernels", "tokens", "ms", "torch", "ms", "ratio")
    for column in (*columns, "transformers ms", "ratio"):
        prefill.add_column(column, justify="right")
    decode = Table(title="Decode alone, and measured memory reads")
    for column in ("threads", "weights", "batch", "context", "step ms", "bandwidth used", "overhead"):
        decode.add_column(column, justify="right")
    for r in results:
        bare = (r.bare_dtype, f"{r.bare_matmul_s * 1e3:.1f}")
        times = (f"{r.prefill_s * 1e3:.1f}", *bare, f"{r.matmul_ratio:.2f}")
        others = ("", "")
        if r.transformers_s is not None:
            others = (f"{r.transformers_s * 1e3:.1f}", f"{r.transformers_s / r.prefill_s:.2f}")
        prefill.add_row(str(r.threads), r.quantization, r.kernels, str(r.prefill_tokens), *times, *others)
        for batch, step_s in r.decode_s.items():
            shares = (f"{r.bandwidth_ratio(batch):.2f}", f"{100 * r.overhead_share[batch]:.0f} %")
            sizes = (str(batch), str(r.context_tokens))
            decode.add_row(str(r.threads), r.quantization, *sizes, f"{step_s * 1e3:.2f}", *shares)
    new_console().print(prefill, decode)


def _show_servers(results: list[ServerResult]) -> None:
    if not results:
        return
    table = Table(
        title="Servers, medians over the rounds; ratio: output tok/s to that of the other server with the "
        "best median, round by round: median and range"
    )
    for column in (
        "cores",
        "in flight",
        "server",
        "tok/s",
        "TTFT p50",
        "p99 ms",
        "TPOT p50",
        "p99 ms",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for r in sorted(results, key=lambda r: (r.cores, r.load.concurrency)):
        load = r.load
        own = servers.ratios(r, results) if r.peer.startswith("baton") else []
        ratio = f"{statistics.median(own):.2f} ({own[0]:.2f}-{own[-1]:.2f})" if own else ""
        times = (load.ttft_p50_s, load.ttft_p99_s, load.tpot_p50_s, load.tpot_p99_s)
        table.add_row(
            str(r.cores),
            str(load.concurrency),
            r.peer,
            f"{load.output_tokens_per_s:.0f}",
            *(f"{t * 1e3:.1f}" for t in times),
            ratio,
        )
    new_console().print(table)
