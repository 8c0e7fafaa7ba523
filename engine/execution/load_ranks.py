"""What one rank of a worker loads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.shape import Shape
from engine.devices import TORCH_DTYPES, torch_device
from engine.execution.context import ContextStage
from engine.execution.draft import DraftModel
from engine.execution.ranks import Ranks, StagedModel
from engine.experts.following import ExpertConnection
from engine.kv.parts import PoolPart
from engine.kv.pool import KVPool
from engine.loading.adapters import AdapterSlots
from engine.loading.load import LoadedModel, load_model
from engine.model_files.check import check_executed
from engine.model_files.division import Division, pair_cost, rank_divisions
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import resolve_model
from engine.model_files.sizes import kv_geometry
from engine.models.decoder import Decoder, Progress
from engine.parallel.collectives import collectives_of


def set_threads(engine: EngineConfig) -> None:
    if engine.threads:
        torch.set_num_threads(engine.threads)


def on_device(model: ModelConfig, number: int) -> ModelConfig:
    """The model on a device of its own for a rank, which is so many behind the first one of its host's part
    of the worker."""
    return model if model.device == "cpu" else model.model_copy(update={"device": f"cuda:{number}"})


def claim_device(model: ModelConfig) -> torch.device:
    """Make a rank's device that of the calling thread, which kernels are launched on. Raises SetupError."""
    device = torch_device(model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def has_own_pool(model: ModelConfig, engine: EngineConfig) -> bool:
    """Whether a rank's KV pool is in memory that no other rank of its host maps."""
    return collectives_of(engine.collectives, model.device) == "torch"


def load_draft(model: ModelConfig, engine: EngineConfig, loaded: LoadedModel) -> DraftModel | None:
    """The leader's. A draft model is not divided."""
    return DraftModel.load(model, engine, loaded) if engine.speculation == "draft" else None


def check_ranks(model: ModelConfig, engine: EngineConfig, shape: Shape) -> None:
    """Raises SetupError for several ranks that this engine does not execute."""
    try:
        check_executed(shape, engine, model.device)
    except SetupError as error:
        raise SetupError(f"engine.shape={shape}: {error}") from None


def divisions_of(model: ModelConfig, shape: Shape) -> tuple[Division, ...]:
    """Raises SetupError for a shape that the model cannot have."""
    return rank_divisions(load_spec(resolve_model(model.path, model.revision)), shape)


def load_rank(
    model: ModelConfig,
    engine: EngineConfig,
    ranks: Ranks,
    division: Division,
    progress: Progress | None = None,
    experts: ExpertConnection | None = None,
) -> LoadedModel:
    is_staged = ranks.shape.pipeline > 1
    loaded = load_model(
        model,
        engine,
        group=ranks.tensor,
        context=ranks.context,
        layers=division.layers if is_staged else None,
        shares_pool=not ranks.is_leader and not has_own_pool(model, engine),
        routed=experts.routed if experts is not None else None,
        progress=progress,
    )
    if not is_staged and ranks.context is None:
        return loaded
    assert isinstance(loaded.model, Decoder)
    stage, geometry = loaded.model, loaded.kv.geometry
    hidden_size, dtype = loaded.spec.hidden_size, TORCH_DTYPES[geometry.dtype]
    if ranks.context is not None:
        stage = ContextStage(
            stage,
            ranks.context,
            hidden_size=hidden_size,
            dtype=dtype,
            block_tokens=geometry.block_tokens,
            pair_cost=pair_cost(loaded.spec),
        )
    if not is_staged:
        return replace(loaded, model=stage)
    staged = StagedModel(
        stage,
        ranks,
        hidden_size=hidden_size,
        vocab=loaded.spec.vocab_size,
        dtype=dtype,
        device=loaded.kv.device,
    )
    return replace(loaded, model=staged)


def own_part(loaded: LoadedModel) -> PoolPart:
    if loaded.spec.is_native:
        return part_of(loaded.division, loaded.kv)
    geometry = loaded.whole_geometry
    return PoolPart(range(geometry.layer_count), range(geometry.kv_head_count), loaded.kv)


def mapped_parts(
    model: ModelConfig,
    engine: EngineConfig,
    divisions: Sequence[Division],
    own: KVPool,
    addresses: Mapping[int, str],
) -> tuple[PoolPart, ...]:
    """The pools of the leader and of followers of this host, by rank. addresses: of the followers' pools;
    empty where a pool is its own rank's alone."""
    shape = Shape.parse(engine.shape)
    parts = [part_of(divisions[0], own)]
    for rank, address in sorted(addresses.items()):
        if shape.position(rank).context_rank or not address:
            continue  # the first context rank's pool is its own too
        geometry = kv_geometry(divisions[rank].rank_spec(), model, engine)
        pool = KVPool.attach(geometry, address, block_count=own.block_count)
        parts.append(part_of(divisions[rank], pool))
    return tuple(parts)


def part_of(division: Division, pool: KVPool) -> PoolPart:
    return PoolPart(division.layers or range(division.spec.layer_count), division.kv_heads(), pool)


def adapter_slots(loaded: LoadedModel, engine: EngineConfig) -> AdapterSlots:
    """The memory of a rank's adapters."""
    return AdapterSlots(
        loaded.linears,
        loaded.division,
        slot_count=engine.adapters_max,
        rank_max=engine.adapter_rank_max,
        dtype=TORCH_DTYPES[loaded.kv.geometry.dtype],
        device=loaded.kv.device,
    )
