"""The choice of kernels: `engine.kernels`, and what the machine allows."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from baton.config import EngineConfig
from baton.core.errors import SetupError
from baton.core.messages import INFO_NOTE
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kernels.torch_ref import TorchKernels
from engine.kv.pool import KVPool
from engine.native.build import NativeUnavailable
from engine.native.library import usable_cores

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Receives one line for `Member.notes`."""


def make_kernels(
    engine: EngineConfig, pool: KVPool, *, tell: Tell = lambda note: None
) -> Kernels[Any, Any, Any]:
    """Make the kernels that `engine.kernels` asks for. One line in the log, and to `tell`, says which were
    chosen and the reason.

    Raises SetupError if the kernels that were asked for cannot run on this machine.
    """
    match engine.kernels:
        case "torch":
            _say("kernels: torch, as asked for", tell)
            return TorchKernels(pool)
        case "native":
            try:
                return _native(engine, pool, "as asked for", tell)
            except NativeUnavailable as error:
                raise SetupError(
                    _with_compiler_log(f"engine.kernels=native cannot run here: {error}", error)
                ) from error
        case "triton":
            kernels = _triton(pool)
            _say("kernels: triton, as asked for", tell)
            return kernels
        case "auto":
            return _best(engine, pool, tell)


def _best(engine: EngineConfig, pool: KVPool, tell: Tell) -> Kernels[Any, Any, Any]:
    if pool.device.type != "cpu":
        return _best_on_gpu(pool, tell)
    try:
        return _native(engine, pool, "the fastest on a CPU", tell)
    except (NativeUnavailable, SetupError) as error:
        slower = f"kernels: torch, slower, because the native ones are not to be had: {error}"
        log.warning("%s", _with_compiler_log(slower, error))
        tell(slower)
        return TorchKernels(pool)


def _best_on_gpu(pool: KVPool, tell: Tell) -> Kernels[Any, Any, Any]:
    try:
        kernels = _triton(pool)
    except SetupError as error:
        slower = f"kernels: torch, slower, because the triton ones are not to be had: {error}"
        log.warning("%s", slower)
        tell(slower)
        return TorchKernels(pool)
    _say(f"kernels: triton, for {pool.device}", tell)
    return kernels


def _triton(pool: KVPool) -> Kernels[Any, Any, Any]:
    # Imported here: Triton takes half a second, and is of use on GPUs only.
    try:
        from engine.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        raise SetupError("engine.kernels=triton needs the package triton: install baton[worker]") from error
    return TritonKernels(pool)


def _native(engine: EngineConfig, pool: KVPool, reason: str, tell: Tell) -> NativeKernels:
    # torch has read OMP_NUM_THREADS, this worker's share of the cores.
    threads = engine.threads or min(usable_cores(), torch.get_num_threads())
    kernels = NativeKernels(pool, threads=threads)
    _say(f"kernels: native ({kernels.features}, threads: {kernels.thread_count}), {reason}", tell)
    return kernels


def _say(line: str, tell: Tell) -> None:
    log.info("%s", line)
    tell(INFO_NOTE + line)


def _with_compiler_log(message: str, error: Exception) -> str:
    compiler_said = error.log if isinstance(error, NativeUnavailable) else ""
    return f"{message}\n{compiler_said}" if compiler_said else message
