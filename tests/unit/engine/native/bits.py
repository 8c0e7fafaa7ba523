"""What the kernels of one library compute, as a digest of all bits: products, activations, attention.

`python -m tests.unit.engine.native.bits FOLDER` takes the library that was compiled ahead into FOLDER, if
there is one of the class, and prints whether it did, and the digest.
"""

import hashlib
import sys
from pathlib import Path

import torch

from baton.core.geometry import KVGeometry
from engine.kernels.native import NativeKernels
from engine.kernels.native_attention import NativeAttention
from engine.kv.pool import KVPool
from engine.native import build
from engine.native.classes import candidates
from tests.unit.engine.native.test_attention import SPECS, attend, pool_of, random_sequence
from tests.unit.engine.native.test_bytes import MATRICES
from tests.unit.engine.native.test_products import BATCHED, BF16, random


def products(kernels):
    of_bytes = {name: (matrix, BF16) for name, matrix in MATRICES.items()}
    for matrix, dtype in (BATCHED | of_bytes).values():
        packed = kernels.pack(matrix)
        for rows in (1, 4, 9, 33, 70):
            x = random(rows, packed.in_size, seed=rows, dtype=dtype)
            yield kernels.linear(x, packed)
            yield kernels.logits(x, packed)
            yield kernels.gated_linear(x, packed, "silu")


def attentions():
    for dtype in ("bfloat16", "float32"):
        for kv_dtype in ("auto", "int8"):
            geometry = KVGeometry(1, 2, 64, 16, dtype, kv_dtype=kv_dtype)
            for spec in SPECS.values():
                kernels = NativeAttention(pool_of(geometry, 40))
                subject = random_sequence(geometry, 6, 200, list(range(40)), 1)
                for start, count in ((0, 150), (150, 49), (199, 1)):
                    yield from attend(kernels, geometry, spec, [(subject, start, count)])


def activations(kernels):
    x = random(8, 200, seed=3) * 20
    for name in ("silu", "gelu", "gelu_tanh"):
        yield kernels.gated(x, x.flip(0), name)
    yield kernels.rms_norm(x.to(BF16), torch.ones(200, dtype=BF16), 1e-6)


def main(folder):
    build.AHEAD_FOLDER = Path(folder)
    is_ahead = build.find_ahead(candidates()[0]) is not None
    geometry = KVGeometry(1, 1, 8, 4, "bfloat16")
    kernels = NativeKernels(KVPool(geometry, kv_bytes=2**16, device=torch.device("cpu")), threads=1)
    digest = hashlib.blake2b(digest_size=16)
    for result in (*products(kernels), *attentions(), *activations(kernels)):
        digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    print("ahead" if is_ahead else "here", digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
