"""Where a worker's memory went at its start: one line for the log of the control plane and `baton doctor`."""

from collections.abc import Mapping

from baton.config import Config
from baton.config.served_models import worker_count
from baton.core.messages import INFO_NOTE, MEMORY_NOTE
from engine.execution.executor import Executor
from engine.loading.load import with_kv_bytes
from engine.model_files.host_memory import give_back_free_memory, own_bytes, resident_at


def with_pool_size(config: Config, gpus: float = 0.0) -> Config:
    """The configuration with a size for the KV pool, if it leaves that open. gpus: those that are reserved
    for this worker, less than 1 where several share one; 0: workers, also those of other models, share what
    there is. Raises SetupError."""
    sharing = max(1, round(1 / gpus)) if gpus else worker_count(config)
    engine = with_kv_bytes(config.model, config.engine, worker_count=sharing, knows_share=gpus > 0)
    return config.model_copy(update={"engine": engine})


def memory_note(executor: Executor) -> str:
    """The note about this process as it is now, after what it freed went back to the system."""
    give_back_free_memory()
    kv = executor.kv
    pool_bytes, tokens = kv.block_bytes * kv.block_count, kv.block_count * kv.geometry.block_tokens
    is_ours = kv.device.type == "cpu" and not kv.address
    pool_here = min(pool_bytes, resident_at(kv.base_address)) if is_ours else 0
    weights_here = executor.weights_bytes if kv.device.type == "cpu" else 0
    runtime = runtime_bytes(own_bytes(), weights_bytes=weights_here, pool_bytes=pool_here)
    return INFO_NOTE + memory_text(
        weights_bytes=executor.weights_bytes,
        pool_bytes=pool_bytes,
        pool_tokens=tokens,
        runtime_bytes=runtime,
        ranks=executor.rank_count,
    )


def runtime_bytes(own: Mapping[str, int], *, weights_bytes: int, pool_bytes: int) -> int:
    """What libraries and their working memory take. Memory that processes share is not counted."""
    return max(0, own.get("RssAnon", 0) + own.get("RssFile", 0) - weights_bytes - pool_bytes)


def memory_text(
    *, weights_bytes: int, pool_bytes: int, pool_tokens: int, runtime_bytes: int, ranks: int = 1
) -> str:
    """Sizes are of one of the worker's ranks, tokens those that all hold together."""
    whose = f"of the first of {ranks} ranks: " if ranks > 1 else ""
    parts = (
        f"{whose}weights {_mb(weights_bytes)}",
        f"KV pool {_mb(pool_bytes)} ({pool_tokens:,} tokens)",
        f"libraries and working memory {_mb(runtime_bytes)}",
    )
    return f"{MEMORY_NOTE}{', '.join(parts)}; the store's arena is shared with this host's processes"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
