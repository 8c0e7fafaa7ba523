"""e4m3 in integer arithmetic against torch's."""

import torch
import triton
import triton.language as tl

from engine.kernels.triton.quantize import e4m3_decode, e4m3_encode


@triton.jit
def encode(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, e4m3_encode(tl.load(x + i)))


@triton.jit
def decode(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, e4m3_decode(tl.load(x + i), tl.float32))


def test_every_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256)
    decode[(1,)](codes, out, N=256)
    expected = codes.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert torch.equal(out[is_number] * 256, expected[is_number])


def test_numbers_are_encoded_to_the_nearest() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat((codes, ties, torch.randn(1795) * 30)).clamp(-448, 448)
    x = torch.cat((x, -x[:0], x[: 2048 - len(x)]))
    out = torch.empty(2048, dtype=torch.uint8)
    encode[(1,)](x, out, N=2048)
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))
