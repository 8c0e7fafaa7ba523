"""The way from a model folder and the configuration to a model that computes."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton.config import EngineConfig, ModelConfig
from baton.config.served_models import default_name
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry, fingerprint
from baton.core.messages import WIRE_VERSION
from baton.core.shape import Shape
from engine.devices import TORCH_DTYPES, torch_device
from engine.kernels.choose import make_kernels
from engine.kernels.interface import Kernels
from engine.kv.pool import KVPool
from engine.loading.checkpoint import Checkpoint
from engine.loading.divided_source import DividedSource
from engine.loading.gguf_checkpoint import GgufCheckpoint
from engine.loading.offloading import Offloading
from engine.loading.parts import PartSource
from engine.loading.sources import open_checkpoint, open_source
from engine.model_files.division import Division, check_division
from engine.model_files.fallback_spec import check_fallback
from engine.model_files.gguf.folder import weight_files_of
from engine.model_files.host_memory import give_back_free_memory, memory_limit, own_bytes
from engine.model_files.quant_scheme import check_quantization
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import resolve_model
from engine.model_files.safetensors_files import weight_files
from engine.model_files.sizes import (
    automatic_kv_bytes,
    context_tokens,
    device_kv_bytes,
    kv_geometry,
    pool_block_count,
)
from engine.model_files.spec import ModelSpec
from engine.models.decoder import Decoder, Progress
from engine.models.fallback import FallbackModel
from engine.models.linear import Linear, Loader, RoutedExperts
from engine.models.model import LanguageModel
from engine.models.tensor_ranks import TensorRanks
from engine.offload.choice import MEMORY_ADVICE, Room
from engine.offload.memory import memory_room
from engine.parallel.group import Group, broadcast_address

RoutedFactory = Callable[[Division, torch.dtype], RoutedExperts]
"""Connects a rank of a model, of this data type, to the expert ranks."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    spec: ModelSpec
    """The whole model."""
    division: Division
    """The part of it that this rank holds. `kv`, `model` and `linears` are the rank's."""
    folder: Path
    """Folder of the model on this machine, with its tokenizer."""
    name: str
    fingerprint: str
    context_tokens: int
    """Prompt plus generated tokens of one sequence: the context, or the whole pool if smaller."""
    kv: KVPool
    whole_geometry: KVGeometry
    """Geometry of the whole model's KV, of which `kv` holds the rank's part."""
    kernels: Kernels[Any, Any, Any]
    model: LanguageModel
    linears: tuple[Linear[Any], ...]
    """Those that adapters may change."""
    notes: tuple[str, ...]
    """Lines for `Member.notes`: the kernels that compute, and each way in which the model runs slower than it
    might."""
    weights_bytes: int = 0
    """Memory that weights took, as the device or the kernel count it."""
    offloading: Offloading | None = None
    """None for a model that runs through transformers' modules."""
    has_remote_experts: bool = False
    """Its routed experts are on ranks of their own."""

    @property
    def floor_s(self) -> float:
        """The least time of a step, which reading streamed layers takes. 0: none is streamed."""
        return self.offloading.floor_s if self.offloading is not None else 0.0


def load_model(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    group: Group | None = None,
    context: Group | None = None,
    layers: range | None = None,
    shares_pool: bool = False,
    routed: RoutedFactory | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read a rank's part of the model and allocate its KV pool. group: the tensor ranks; context: the context
    ranks, which have one pool together; None: there is one. layers: of the pipeline stage; None: all.
    shares_pool: other processes may map the pool. routed: connects to expert ranks; None: the model's experts
    are loaded. `progress(layers loaded, layers in all)`.

    Raises SetupError: no such device, too little memory, no such model, or one that cannot be used so.
    """
    device, (folder, spec) = torch_device(model.device), checked_spec(model)
    division, tokens = _division(spec, group, layers), context_tokens(spec, model)
    geometry = kv_geometry(division.rank_spec() if spec.is_native else spec, model, engine)
    checkpoint = open_checkpoint(folder)
    # Workers of all shapes hold the same blocks, so the geometry that counts is the whole model's.
    whole, asked_bytes = kv_geometry(spec, model, engine), with_kv_bytes(model, engine).kv_bytes
    kv_bytes = pool_block_count(whole, asked_bytes) * geometry.block_bytes
    kv = _pool(geometry, kv_bytes, device, context, is_shared=shares_pool)
    notes, before_bytes = list[str](), _taken(device)
    kernels = make_kernels(engine, kv, tell=notes.append)
    if isinstance(checkpoint, GgufCheckpoint):
        notes.extend(_of_gguf(checkpoint.dense_types(), model.quantization))
    if spec.is_native:
        dtype = TORCH_DTYPES[geometry.dtype]
        source = open_source(checkpoint, spec, model, dtype=dtype, device=device)
        offloading = _offloading(model, engine, division, checkpoint, dtype, kv_bytes)
        loader = _loader(source, kernels, division, group, offloading, routed and routed(division, dtype))
        network, linears = _decoder(division, loader, offloading, checkpoint, tokens, progress)
        notes.extend(offloading.notes)
    else:
        network, linears, offloading = FallbackModel(spec, folder, kernels, kv), (), None
        notes.append(network.note)
        (progress or _ignored)(spec.layer_count, spec.layer_count)
    name = model.name or default_name(model.path) or folder.resolve().name
    digest = _model_digest(spec, checkpoint.digest(), tokens, model.quantization)
    return LoadedModel(
        spec=spec,
        division=division,
        folder=folder,
        name=name,
        fingerprint=fingerprint(model=name, weights_digest=digest, geometry=whole, wire_version=WIRE_VERSION),
        context_tokens=min(tokens, kv.block_count * geometry.block_tokens),
        kv=kv,
        whole_geometry=whole,
        kernels=kernels,
        model=network,
        linears=linears,
        notes=tuple(notes),
        offloading=offloading,
        has_remote_experts=routed is not None,
        weights_bytes=max(0, _taken(device) - before_bytes),
    )


def with_kv_bytes(
    model: ModelConfig, engine: EngineConfig, *, worker_count: int = 1, knows_share: bool = True
) -> EngineConfig:
    """The configuration with a size for the KV pool, if it leaves that open. Workers of `worker_count` share
    the device or the host's memory; without `knows_share` there may be more of them. Raises SetupError, see
    `load_model`."""
    if engine.kv_bytes:
        return engine
    device, (folder, spec) = torch_device(model.device), checked_spec(model)
    is_cuda = device.type == "cuda"
    memory_bytes = torch.cuda.mem_get_info(device)[1] if is_cuda else memory_limit()
    geometry, tokens = kv_geometry(spec, model, engine), context_tokens(spec, model)
    kv_bytes = automatic_kv_bytes(geometry, tokens, memory_bytes=memory_bytes, worker_count=worker_count)
    # Of a GGUF file some types take more memory than in the file, and a draft model comes on top.
    if is_cuda and knows_share and not engine.draft_model and weight_files_of(folder) is None:
        left = device_kv_bytes(
            geometry,
            Shape.parse(engine.shape),
            memory_bytes=memory_bytes,
            worker_count=worker_count,
            weights_bytes=sum(file.stat().st_size for file in weight_files(folder)),
        )
        kv_bytes = left or kv_bytes
    return engine.model_copy(update={"kv_bytes": kv_bytes})


def _taken(device: torch.device) -> int:
    """Bytes that this process has in the memory that weights go to, without what it freed."""
    give_back_free_memory()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return own_bytes().get("RssAnon", 0)


def _ignored(done: int, total: int) -> None:
    """Take no notice of the progress."""


def checked_spec(model: ModelConfig) -> tuple[Path, ModelSpec]:
    """The model's folder on this machine and its spec. Raises SetupError: no such model, or one that cannot
    be loaded as the configuration asks."""
    folder = resolve_model(model.path, model.revision)
    spec = load_spec(folder)
    check_quantization(spec.quantization, model)
    check_fallback(spec, model)
    return folder, spec


def _decoder(
    division: Division,
    loader: Loader[Any, Any, Any],
    offloading: Offloading,
    checkpoint: Checkpoint | GgufCheckpoint,
    context_tokens: int,
    progress: Progress | None,
) -> tuple[LanguageModel, tuple[Linear[Any], ...]]:
    """The rank's part of the forward pass, and its matrices that adapters may change. Raises SetupError."""
    try:
        network = Decoder(
            division.rank_spec(),
            loader,
            context_tokens=context_tokens,
            stage=division.stage,
            progress=_releasing(checkpoint, progress),
        )
        checkpoint.release()
        offloading.start()
    except (MemoryError, RuntimeError, SetupError) as error:
        offloading.close()
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise SetupError(f"not enough memory for the model's weights: {MEMORY_ADVICE}") from error
        raise
    return network, tuple(loader.linears)


def _pool(
    geometry: KVGeometry, kv_bytes: int, device: torch.device, context: Group | None, *, is_shared: bool
) -> KVPool:
    """The rank's KV pool, which the first of several context ranks allocates and the others map."""
    if context is None:
        return KVPool(geometry, kv_bytes=kv_bytes, device=device, is_shared=is_shared)
    if context.rank == 0:
        kv = KVPool(geometry, kv_bytes=kv_bytes, device=device, is_shared=True)
        broadcast_address(context, kv.address)
        return kv
    block_count = pool_block_count(geometry, kv_bytes)
    return KVPool.attach(geometry, broadcast_address(context, ""), block_count=block_count)


def _offloading(
    model: ModelConfig,
    engine: EngineConfig,
    division: Division,
    checkpoint: Checkpoint | GgufCheckpoint,
    dtype: torch.dtype,
    pool_bytes: int,
) -> Offloading:
    spec, stage = division.rank_spec(), division.stage
    table_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
    ranks = Shape.parse(engine.shape).rank_count

    def room(first_bytes: int) -> Room:
        left = memory_room(torch_device(model.device), rank_count=ranks, pool_bytes=pool_bytes)
        if not model.weights_bytes_max:
            return left
        taken = first_bytes + (table_bytes if stage.is_first else 0)
        asked = Room(model.weights_bytes_max - taken, "model.weights_bytes_max", is_hard=True)
        return min(left, asked, key=lambda one: one.byte_count)

    return Offloading(
        model,
        engine,
        layers=range(stage.first_layer, stage.first_layer + spec.layer_count),
        layer_count=division.spec.layer_count,
        stored=checkpoint.layer_bytes(),
        rest=table_bytes if stage.is_last else 0,
        room=room,
    )


def _division(spec: ModelSpec, group: Group | None, layers: range | None) -> Division:
    """Raises SetupError, see `check_division`."""
    if group is None:
        return Division(spec, layers=layers)
    check_division(spec, tensor=group.size)
    return Division(spec, group.size, group.rank, layers)


def _loader(
    source: PartSource,
    kernels: Kernels[Any, Any, Any],
    division: Division,
    group: Group | None,
    offloading: Offloading,
    routed: RoutedExperts | None,
) -> Loader[Any, Any, Any]:
    if group is None or group.size == 1:
        return Loader(source, kernels, keeper=offloading, routed=routed)
    ranks = TensorRanks(group, division.vocabulary)
    return Loader(DividedSource(source, division), kernels, ranks, offloading, routed)


def _of_gguf(types: list[str], quantization: str) -> Iterator[str]:
    if quantization != "none":
        yield (
            f"quantization: model.quantization={quantization} rounds only matrices that the GGUF file does "
            "not have as integers"
        )
        return
    if types:
        yield (
            f"weights: the file's {', '.join(types)} matrices are made dense, which takes more memory and is "
            "slower: take a Q8_0, Q4_K_M or Q4_0 file, or set model.quantization=int8 or int4"
        )


def _releasing(checkpoint: Checkpoint | GgufCheckpoint, progress: Progress | None) -> Progress:
    """So that beyond one layer the checkpoint is not in this process's memory beside the packed matrices."""

    def layer_done(done: int, total: int) -> None:
        checkpoint.release()
        if progress is not None:
            progress(done, total)

    return layer_done


def _model_digest(spec: ModelSpec, weights_digest: str, tokens: int, quantization: str) -> str:
    """Whatever changes a key or value: the weights, and how config.json says to use them."""
    facts = msgspec.structs.asdict(spec)
    originals = [rope.original_context_tokens for rope in spec.ropes if rope.depends_on_context]
    if originals:
        facts["rope_context_tokens"] = max(tokens, *originals)
    if quantization != "none":
        facts["quantized_at_load"] = quantization
    for name in ("eos_token_ids", "context_tokens", "context_tokens_limit"):
        del facts[name]
    text = f"{weights_digest} {sorted(facts.items())!r}"
    return hashlib.sha256(text.encode()).hexdigest()
