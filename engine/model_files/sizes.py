"""Sizes that follow from a model and the configuration, before anything is loaded. No torch here."""

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.shape import Shape
from engine.model_files.spec import ModelSpec

KV_CONTEXTS = 1.25
"""Sequences of the whole context that an automatic pool holds. Most sequences are much shorter, and the store
keeps what leaves the pool."""
KV_BYTES_MIN = 128 * 2**20
"""Least size of an automatic pool, for models whose context takes little."""
KV_MEMORY_SHARE = 0.5
"""Part of the memory that automatic pools take at most; weights and everything else have the other."""
DEVICE_MEMORY_SHARE = 0.9
"""Part of a GPU's memory that workers with automatic pools take, as with vLLM."""
DEVICE_WORKING_BYTES = 2 * 2**30
"""Memory of a worker on a GPU beside weights and KV: activations of a step, recorded steps, libraries."""


def kv_geometry(spec: ModelSpec, model: ModelConfig, engine: EngineConfig) -> KVGeometry:
    dtype = spec.dtype if model.dtype == "auto" else model.dtype
    if spec.mla is None:
        return KVGeometry(
            layer_count=spec.layer_count,
            kv_head_count=spec.kv_head_count,
            head_dim=spec.head_dim,
            block_tokens=engine.block_tokens,
            dtype=dtype,
            kv_dtype=model.kv_dtype,
        )
    rank = spec.mla.kv_lora_rank
    return KVGeometry(
        layer_count=spec.layer_count,
        kv_head_count=1,
        head_dim=rank + spec.mla.rope_dim,
        block_tokens=engine.block_tokens,
        dtype=dtype,
        planes=1,
        value_dim=rank,
        kv_dtype=model.kv_dtype,
    )


def pool_block_count(geometry: KVGeometry, kv_bytes: int) -> int:
    """Number of blocks in the pool, at least 1. Raises SetupError if `kv_bytes` holds no block."""
    count = kv_bytes // geometry.block_bytes
    if count < 1:
        raise SetupError(
            f"engine.kv_bytes={kv_bytes} holds no KV block: one block of {geometry.block_tokens} tokens "
            f"has {geometry.block_bytes} bytes"
        )
    return count


def automatic_kv_bytes(
    geometry: KVGeometry, context_tokens: int, *, memory_bytes: int, worker_count: int
) -> int:
    """Size of a KV pool that nobody chose: room for `KV_CONTEXTS` sequences of the whole context, at least
    KV_BYTES_MIN, and at most the worker's share of KV_MEMORY_SHARE of the memory. It always holds a block.

    `geometry` is the whole model's, and `memory_bytes` what `worker_count` workers have together.
    """
    blocks = -(-int(context_tokens * KV_CONTEXTS) // geometry.block_tokens)
    wanted = max(KV_BYTES_MIN, blocks * geometry.block_bytes)
    most = int(memory_bytes * KV_MEMORY_SHARE) // max(1, worker_count)
    return max(geometry.block_bytes, min(wanted, most))


def device_kv_bytes(
    geometry: KVGeometry, shape: Shape, *, memory_bytes: int, worker_count: int, weights_bytes: int
) -> int:
    """Size of a KV pool on GPUs that nobody chose: what the weights and `DEVICE_WORKING_BYTES` leave of the
    worker's share of `DEVICE_MEMORY_SHARE` of the memory. 0: less than KV_BYTES_MIN, as where the weights are
    rounded at load or streamed, and their files say little about what they take.

    `geometry` is the whole model's, and so is the result; `memory_bytes` is that of one device, which
    `worker_count` workers share, and `weights_bytes` those of the whole model.
    """
    room = int(memory_bytes * DEVICE_MEMORY_SHARE) // max(1, worker_count)
    left = room - DEVICE_WORKING_BYTES - weights_bytes // shape.rank_count
    # Tensor ranks divide the heads as far as there are any, and each has the whole of a latent.
    heads = min(shape.tensor, geometry.kv_head_count) if geometry.planes > 1 else 1
    kv_bytes = left * heads * shape.pipeline
    return kv_bytes if kv_bytes >= max(geometry.block_bytes, KV_BYTES_MIN) else 0


def context_tokens(spec: ModelSpec, model: ModelConfig) -> int:
    """Prompt plus generated tokens of one sequence. Raises SetupError: more asked for than there is."""
    asked = model.context_tokens_max
    if asked > spec.context_tokens_limit:
        raise SetupError(
            f"model.context_tokens_max={asked} is more than the model's context of "
            f"{spec.context_tokens_limit} tokens"
        )
    return asked or spec.context_tokens
