"""ggml's blocks against the gguf library's dequantisation, on random bytes with sane scales."""

import gguf
import numpy as np
import pytest
import torch

from engine.kernels.weights import DenseMatrix, IntMatrix, to_dense
from engine.loading.gguf_blocks import blocks_to_matrix, dequantize

FLOATS_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Offsets of a block's float16 numbers."""
DENSE = {"Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"}


@pytest.mark.parametrize("kind", FLOATS_AT)
def test_blocks_mean_what_the_library_says(kind: str) -> None:
    random = np.random.default_rng(1)
    quant_type = gguf.GGMLQuantizationType[kind]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
    blocks = random.integers(0, 256, (6, 512 // per_block, block_bytes), dtype=np.uint8)
    for at in FLOATS_AT[kind]:
        floats = random.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        floats[0, 0] = 0  # a group without extent
        blocks[:, :, at : at + 2] = floats[..., None].view(np.uint8)
    rows = blocks.reshape(6, -1)
    matrix = blocks_to_matrix(rows, kind, torch.float32)
    assert type(matrix) is (DenseMatrix if kind in DENSE else IntMatrix)
    if isinstance(matrix, IntMatrix) and matrix.bits == 4:
        assert int(matrix.values.min()) >= -8
        assert int(matrix.values.max()) <= 7
    expected = torch.from_numpy(gguf.dequantize(rows, quant_type))
    torch.testing.assert_close(to_dense(matrix, torch.float32).weight, expected, rtol=1e-5, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(rows, kind, dtype), expected.to(dtype)), "bit for bit"
