"""The Triton kernels on a real device, against the same definitions as in the interpreter."""

import pytest
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec
from engine.kernels.weights import DenseMatrix, ExpertMatrices
from engine.kv.pool import KVPool
from tests.unit.engine.triton.interpreted.cases import attention_by_definition, make_layout, make_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda", 0)
GQA = KVGeometry(2, 2, 128, 32, "bfloat16")
LATENT = KVGeometry(2, 1, 576, 64, "bfloat16", planes=1, value_dim=512)
BATCH = [(700, 1), (40, 1), (0, 3), (130, 5), (60, 300)]
BLOCKS = 256


def make_kernels(pool: KVPool):
    from engine.kernels.triton.kernels import TritonKernels

    return TritonKernels(pool)


def on_device(pool: KVPool) -> KVPool:
    """The same bytes."""
    copy = KVPool(pool.geometry, kv_bytes=pool.block_count * pool.block_bytes, device=CUDA)
    copy.memory.copy_(pool.memory)
    return copy


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize(
    ("geometry", "heads"),
    [
        (GQA, 14),
        (KVGeometry(2, 2, 128, 32, "bfloat16", kv_dtype="int8"), 8),
        (KVGeometry(1, 2, 64, 16, "float16"), 16),
        (KVGeometry(1, 1, 256, 32, "bfloat16"), 8),
        (LATENT, 64),
    ],
)
def test_attention(geometry, heads, window, softcap) -> None:
    pool, layout = make_pool(geometry, BLOCKS), make_layout(geometry, BATCH, BLOCKS)
    scale = geometry.head_dim**-0.5
    sinks = torch.randn(heads)
    q = torch.randn(layout.token_count, heads, geometry.head_dim).to(getattr(torch, geometry.dtype))
    expected = attention_by_definition(q, pool, layout, AttentionSpec(0, scale, window, softcap, sinks))
    kernels = make_kernels(on_device(pool))
    plan = kernels.plan(layout, {}, windows=frozenset({window}))
    spec = AttentionSpec(0, scale, window, softcap, sinks.to(CUDA))
    out = kernels.attention(q.to(CUDA), spec=spec, plan=plan)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [3, 50, 300])
@pytest.mark.parametrize("name", ["int8", "int8-groups", "int4-groups", "int4-zeros", "fp8", "fp8-blocks"])
def test_products(name, tokens) -> None:
    from tests.unit.engine.triton.interpreted.test_products import MATRICES, weight_of

    matrix = MATRICES[name]
    kernels = make_kernels(KVPool(GQA, kv_bytes=GQA.block_bytes, device=CUDA))
    packed = kernels.pack(moved(matrix))
    weight = weight_of(matrix)
    x = torch.randn(tokens, weight.shape[1]).bfloat16()
    expected = x.double() @ weight.T + (0 if matrix.bias is None else matrix.bias.double())
    out = kernels.linear(x.to(CUDA), packed)
    # Weights that are scaled before the product are rounded to bf16 once more.
    torch.testing.assert_close(out.cpu().double(), expected, atol=8e-2, rtol=2e-2)


def moved(matrix):
    """The matrix on the device."""
    names = matrix.__dataclass_fields__
    values = {name: getattr(matrix, name) for name in names}
    return type(matrix)(**{k: v.to(CUDA) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


@pytest.mark.parametrize("tokens", [5, 400])
def test_experts(tokens) -> None:
    experts, hidden, inner, choices = 8, 256, 128, 2
    kernels = make_kernels(KVPool(GQA, kv_bytes=GQA.block_bytes, device=CUDA))
    up = torch.randn(experts, 2 * inner, hidden) / 16
    down = torch.randn(experts, hidden, inner) / 11
    x, weights = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, choices)
    chosen = torch.rand(tokens, experts).topk(choices).indices
    gate, other = torch.einsum("th,teih->tei", x.float()[:, :], up[None].expand(tokens, -1, -1, -1)).chunk(
        2, -1
    )
    every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * other, down)
    expected = (every.gather(1, chosen[..., None].expand(-1, -1, hidden)) * weights[..., None]).sum(1)
    packed = kernels.pack_experts(
        ExpertMatrices(
            tuple(DenseMatrix(one.bfloat16().to(CUDA)) for one in up),
            tuple(DenseMatrix(one.bfloat16().to(CUDA)) for one in down),
        )
    )
    out = kernels.experts(x.to(CUDA), packed, chosen.to(CUDA), weights.to(CUDA), "silu")
    torch.testing.assert_close(out.cpu().float(), expected, atol=5e-2, rtol=5e-2)


def test_blocks_move_to_and_from_host_memory() -> None:
    pool = on_device(make_pool(GQA, 16))
    kernels, before = make_kernels(pool), pool.memory.clone()
    host = torch.empty(3, pool.block_bytes, dtype=torch.uint8).pin_memory()
    kernels.gather_blocks([5, 0, 9], out=host)
    torch.cuda.synchronize()
    assert torch.equal(host, before[[5, 0, 9]].cpu())
    kernels.scatter_blocks([1, 2, 3], host)
    assert torch.equal(pool.memory[[1, 2, 3]], before[[5, 0, 9]])
