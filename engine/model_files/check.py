"""Can this model be served with this configuration? Asked before any process is started, so no torch
here: it would take seconds to import, and the control plane has no other use for it.

What only loading can tell (tensors of another shape, a device that runs out of memory) the workers say.
"""

import ctypes
import importlib.metadata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil

from baton.config import ROLES, Config, EngineConfig, ModelConfig
from baton.config.served_models import worker_count, worker_shapes
from baton.core.errors import SetupError
from baton.core.shape import Shape
from engine.model_files.division import check_division
from engine.model_files.fallback_spec import check_fallback
from engine.model_files.gguf.folder import weight_files_of
from engine.model_files.gguf.reader import read_gguf
from engine.model_files.offload_setting import check_offload
from engine.model_files.quant_scheme import check_quantization
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import local_folder
from engine.model_files.safetensors_files import check_weights
from engine.model_files.sizes import context_tokens, kv_geometry, pool_block_count
from engine.parallel.collectives import collectives_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def check_model(folder: Path, model: ModelConfig, engine: EngineConfig) -> None:
    """Raises SetupError: no supported model, weights missing or damaged, or a configuration that does
    not fit the model."""
    spec = load_spec(folder)
    check_quantization(spec.quantization, model)
    check_fallback(spec, model)
    gguf_files = weight_files_of(folder)
    if gguf_files is None:
        check_weights(folder)
    else:
        read_gguf(gguf_files[0])
    context_tokens(spec, model)
    if engine.kv_bytes:
        pool_block_count(kv_geometry(spec, model, engine), engine.kv_bytes)


def check_executed(shape: Shape, engine: EngineConfig, device: str) -> None:
    """Raises SetupError for several ranks that the engine does not execute."""
    if shape.is_single:
        return
    if device.startswith("cuda:"):
        raise SetupError(
            f"model.device={device} names one device, and each rank needs its own: set it to cuda"
        )
    if collectives_of(engine.collectives, device) == "torch" and shape.context > 1:
        raise SetupError(
            "context ranks share one KV pool, which only host memory with engine.collectives=shared_memory "
            f"can be so far, and not model.device={device} with engine.collectives={engine.collectives}: use "
            "tensor ranks (tp) or stages (pp)"
        )


def check_shapes(config: Config) -> None:
    """Check the shapes of every role's workers, and how many layers are streamed, with the model's sizes
    where its files are here. Raises SetupError, which names the role, and the number that does not divide."""
    shapes = {role: config.shape_of(role) for role, _ in worker_shapes(config)}
    started = set(shapes)
    shapes |= {role: config.shape_of(role) for role in ROLES}
    several = {role: shape for role, shape in shapes.items() if not shape.is_single}
    streams = config.model.offload.isdigit() and config.model.offload != "0"
    folder = local_folder(config.model.path) if several or streams else None
    spec = None if folder is None else load_spec(folder)
    if streams and spec is not None:
        check_offload(config.model.offload, spec.layer_count)
    for role, shape in several.items():
        try:
            check_executed(shape, config.engine, config.model.device)
            if spec is not None:
                check_division(spec, tensor=shape.tensor, pipeline=shape.pipeline, context=shape.context)
        except SetupError as error:
            later = f" (none is to start now, but one may later: set cluster.shapes.{role})"
            suffix = "" if role in started else later
            raise SetupError(f"{role} workers of shape {shape}: {error}{suffix}") from None


def check_tokenizer(folder: Path) -> None:
    """Raises SetupError: the folder has no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise SetupError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")


def check_machine(model: ModelConfig, engine: EngineConfig, *, worker_count: int) -> None:
    """Check that this machine can run the workers. Raises SetupError if there is no such device, or too
    little memory."""
    if model.device == "cpu":
        _check_memory(engine.kv_bytes, worker_count)
    elif model.device == "cuda" or model.device.startswith("cuda:"):
        _check_cuda(model.device)
    else:
        raise SetupError(f"device {model.device!r} is not supported: use cpu, cuda or cuda:N")


def _check_memory(kv_bytes: int, worker_count: int) -> None:
    total = psutil.virtual_memory().total
    if kv_bytes * worker_count > total:
        raise SetupError(
            f"engine.kv_bytes={kv_bytes} for each of {worker_count} workers is more than this machine's "
            f"memory of {total} bytes"
        )


def check_memory(models: Iterable[Config]) -> None:
    """Check that memory holds the KV pools of all models on the CPU together. Raises SetupError if not."""
    total = psutil.virtual_memory().total
    kv_bytes = sum(one.engine.kv_bytes * worker_count(one) for one in models if one.model.device == "cpu")
    if kv_bytes > total:
        raise SetupError(
            f"engine.kv_bytes of all models' workers, {kv_bytes} bytes, is more than this machine's memory "
            f"of {total} bytes"
        )


def check_gpus(models: Iterable[Config]) -> None:
    """Check that this machine has a GPU for each rank of the workers that have several, beside those that
    workers of one process share. Raises SetupError with the numbers if not."""
    workers = [worker for one in models if one.model.device == "cuda" for worker in worker_shapes(one)]
    several = sum(shape.rank_count for _, shape in workers if not shape.is_single)
    if not several or _torch_build().startswith("rocm"):
        return
    needed = several + any(shape.is_single for _, shape in workers)
    if needed <= (count := _cuda_device_count()):
        return
    texts = Counter(f"{role} of shape {shape}" for role, shape in workers)
    raise SetupError(
        f"the workers ({', '.join(f'{number} {text}' for text, number in texts.items())}) need {needed} "
        f"GPUs, and this machine shows {count} CUDA devices"
    )


def cores_note(models: Iterable[Config], core_count: int) -> str | None:
    """Return one line if ranks of one worker share cores, or None."""
    workers = [worker for one in models if one.model.device == "cpu" for worker in worker_shapes(one)]
    ranks = sum(shape.rank_count for _, shape in workers)
    if ranks <= core_count or all(shape.is_single for _, shape in workers):
        return None
    is_divided_by_layers = all(shape.rank_count == shape.pipeline for _, shape in workers)
    who, when = ("stages", "step") if is_divided_by_layers else ("ranks", "layer")
    return (
        f"the workers have {ranks} ranks in all, and this machine has {core_count} cores: {who} of a worker "
        f"wait for each other in every {when}, so it is slower than a worker of one process"
    )


def _check_cuda(device: str) -> None:
    build = _torch_build()
    if build == "cpu":
        raise SetupError(f"device {device!r} is not to be had: torch is installed without CUDA")
    if build.startswith("rocm"):
        return  # "cuda" is AMD's devices then, which only torch can count
    count = _cuda_device_count()
    index = device.removeprefix("cuda").removeprefix(":") or "0"
    if not index.isdecimal() or int(index) >= count:
        raise SetupError(f"device {device!r} does not exist: this machine shows {count} CUDA devices")


def _torch_build() -> str:
    """The part of torch's version after the +, such as "cpu" or "cu130"; empty if there is none."""
    try:
        return importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda_device_count() -> int:
    """Number of CUDA devices, asked of the driver's own library, which has this name in every
    installation."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
