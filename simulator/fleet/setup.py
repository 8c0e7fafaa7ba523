"""The fleet that is simulated, made from what a person asks for: a model, GPUs, pools, objectives."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import msgspec

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.costs import FEW_DECODES, StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.shape import Shape
from loadgen.lengths import ReplayPlan
from router.decisions.holder_sets import SLOTS_MAX
from simulator.divided import MeasuredRank, divided_costs
from simulator.experts.pool import ExpertPool
from simulator.fleet.spec import FleetSpec, FleetWorkerSpec, StoreSpec
from simulator.hardware import Node

BLOCK_TOKENS = 64
"""Block size where the trace does not say which blocks are shared."""
BLOCK_TOKENS_MAX = 512
"""Largest block size, as for `engine.block_tokens`."""
STEP_TOKENS = 2048
BATCH_SEQUENCES = 256


def block_tokens_of(plan: ReplayPlan) -> int:
    """Return the trace's own block size, if engines can have such blocks."""
    own = plan.block_tokens
    fits = own.denominator == 1 and BLOCK_TOKENS <= own <= BLOCK_TOKENS_MAX
    return int(own) if fits else BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PoolSizes:
    prefill: int = 0
    decode: int = 0
    aggregated: int = 0

    def __str__(self) -> str:
        parts = ((self.prefill, "prefill"), (self.decode, "decode"), (self.aggregated, "aggregated"))
        return " + ".join(f"{count} {name}" for count, name in parts if count)

    @property
    def count(self) -> int:
        return self.prefill + self.decode + self.aggregated

    def of(self, role: Role) -> int:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.AGGREGATED: self.aggregated}[role]


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker, by its data sheet or as measured."""

    name: str
    costs: dict[Role, StepCosts]
    kv_token_bytes: float
    kv_bytes: float
    """Bytes of its KV pool."""
    link_bytes_s: float
    host_bytes_s: float

    def with_link(self, bytes_s: float) -> "Machine":
        return replace(self, link_bytes_s=bytes_s)


def machine_of(node: Node, *, kv_bytes: float | None = None) -> Machine:
    """Describe a worker by the roofline. Raises SetupError when the model does not fit or divide."""
    _check_division(node)
    return Machine(
        f"{node.model.name} on {node.gpu_count} × {node.gpu.name}",
        {role: node.costs(role) for role in Role},
        node.kv_bytes_per_token,
        node.kv_pool_bytes() if kv_bytes is None else kv_bytes,
        node.transfer_bytes_s,
        node.host_bytes_s,
    )


def _check_division(node: Node) -> None:
    model = node.model
    if model.heads % node.tensor:
        widths = ", ".join(f"tp{n}" for n in range(1, model.heads + 1) if model.heads % n == 0)
        raise SetupError(
            f"tp{node.tensor} is not possible: {model.heads} attention heads of {model.name} do not divide "
            f"by {node.tensor}; possible are {widths}"
        )
    if node.pipeline > model.layers:
        raise SetupError(
            f"pp{node.pipeline} has more stages than {model.name} has layers: at most pp{model.layers} is "
            "possible"
        )


def expert_machine(pool: ExpertPool, *, engine: EngineConfig, kv_bytes: float | None) -> Machine:
    """Describe a worker of a pool whose experts are divided. Raises SetupError when they do not fit."""
    costs = pool.costs(chunk_tokens=engine.step_tokens_max, batch=engine.batch_sequences_max)
    return Machine(
        f"{pool.model.name} on 1 × {pool.gpu.name}, experts over {pool.layout.ranks} ranks",
        dict.fromkeys(Role, costs),
        pool.kv_bytes_per_token,
        pool.kv_pool_bytes() if kv_bytes is None else kv_bytes,
        pool.transfer_bytes_s,
        pool.host_bytes_s,
    )


def with_costs(machine: Machine, measured: StepCosts | MeasuredRank, shape: Shape, name: str) -> Machine:
    """Return the same machine with measured costs. Those of one rank are divided over the ranks of
    `shape`."""
    if isinstance(measured, StepCosts):
        return replace(machine, name=name, costs=dict.fromkeys(Role, measured))
    return replace(machine, name=name, costs={role: divided_costs(measured, shape, role) for role in Role})


def read_costs(path: Path) -> StepCosts | MeasuredRank:
    """Read `StepCosts` as JSON, or what `baton bench engine --json` or `baton bench parallel --json` printed.
    Raises SetupError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from None
    try:
        return msgspec.json.decode(text, type=StepCosts)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} is no JSON: {error}") from None
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.json.decode(text, type=_ParallelBench).one_rank
    try:
        return _from_bench(msgspec.json.decode(text, type=_EngineBench))
    except (msgspec.ValidationError, ValueError) as error:
        fields = ", ".join(StepCosts.__struct_fields__)
        raise SetupError(
            f"{path}: neither step costs ({fields}) nor the JSON of `baton bench engine` or of "
            f"`baton bench parallel` with its part predict: {error}"
        ) from None


class _ParallelBench(msgspec.Struct):
    """The field of `benchmarks.parallel.cli.ParallelReport` that says what steps cost."""

    one_rank: MeasuredRank


class _EngineBench(msgspec.Struct):
    """Fields of `benchmarks.engine.EngineResult` that say what steps cost."""

    prefill_tokens: int
    prefill_s: float
    decode_s: dict[int, float]
    context_tokens: int
    decode_bytes: dict[int, int]
    read_bytes_per_s: float


def _from_bench(bench: _EngineBench) -> StepCosts:
    """Lay the costs through the bench's points: a step that decodes few, one that decodes many, one chunk of
    a prompt. The bytes that another decode reads show how its cost splits between itself and its context."""
    if len(bench.decode_s) < 2:
        raise ValueError("decode steps of at least two batch sizes are needed")
    few, many = min(bench.decode_s), max(bench.decode_s)
    knee = FEW_DECODES if FEW_DECODES in bench.decode_s and many > FEW_DECODES else few
    each_s = max(0.0, (bench.decode_s[many] - bench.decode_s[knee]) / (many - knee))
    early_s = (bench.decode_s[knee] - bench.decode_s[few]) / (knee - few) - each_s if knee > few else 0.0
    kv_bytes = (bench.decode_bytes[many] - bench.decode_bytes[few]) / (many - few)
    context_s = min(each_s, kv_bytes / bench.read_bytes_per_s)
    few_s = max(context_s - each_s, early_s)
    base_s = max(0.0, bench.decode_s[few] - few * (each_s + few_s))
    token_s = max(0.0, bench.prefill_s - base_s) / bench.prefill_tokens
    context_token_s = context_s / max(1, bench.context_tokens)
    return StepCosts(base_s, token_s, each_s - context_s, context_token_s, few_decode_s=few_s)


def fleet_spec(
    machine: Machine | Mapping[Role, Machine],
    pools: PoolSizes,
    *,
    block_tokens: int,
    router: RouterConfig,
    engine: EngineConfig,
    slo_classes: dict[str, tuple[float, float]],
    max_model_tokens: int | None = None,
    heartbeat_s: float = 0.25,
    hop_s: float = 0.0002,
    cells: int = 1,
    store: StoreSpec | None = None,
    refuses_late: bool = False,
    seed: int = 0,
) -> FleetSpec:
    """Describe the fleet, of workers that are all alike or of one kind per role. Raises SetupError when no
    pool can serve, or memory holds too few blocks."""
    if not pools.aggregated and not (pools.prefill and pools.decode):
        raise SetupError("a cluster needs --aggregated N, or --prefill N and --decode N")
    if any(0 < pools.of(role) < cells for role in Role):
        raise SetupError(f"{cells} cells need at least that many workers of each role in use")
    if pools.count > SLOTS_MAX * cells:
        raise SetupError(
            f"{pools.count} workers need more than {cells} cells: a router follows at most {SLOTS_MAX} "
            "workers"
        )
    machines = machine if isinstance(machine, Mapping) else dict.fromkeys(Role, machine)
    kinds = tuple(
        (
            _worker_spec(
                machines[role], role, block_tokens=block_tokens, engine=engine, tokens_max=max_model_tokens
            ),
            pools.of(role),
        )
        for role in Role
        if pools.of(role)
    )
    return FleetSpec(
        kinds,
        router,
        heartbeat_s=heartbeat_s,
        hop_s=hop_s,
        cells=cells,
        store=store or StoreSpec(),
        seed=seed,
        slo_classes=slo_classes,
        refuses_late=refuses_late,
    )


def _worker_spec(
    machine: Machine, role: Role, *, block_tokens: int, engine: EngineConfig, tokens_max: int | None
) -> FleetWorkerSpec:
    """Raises SetupError when memory holds too few blocks."""
    blocks = int(machine.kv_bytes / machine.kv_token_bytes / block_tokens)
    if blocks < 16:
        raise SetupError(
            f"{machine.name}: its memory holds {blocks} blocks of {block_tokens} tokens; 16 are few"
        )
    return FleetWorkerSpec(
        role=role,
        costs=machine.costs[role],
        block_tokens=block_tokens,
        block_count=blocks,
        kv_token_bytes=machine.kv_token_bytes,
        max_model_tokens=int(min(tokens_max or inf, blocks * block_tokens)),
        engine=engine,
        send_bytes_s=machine.link_bytes_s,
        receive_bytes_s=machine.link_bytes_s,
    )
