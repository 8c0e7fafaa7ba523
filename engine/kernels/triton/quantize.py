"""Eight-bit numbers in registers: parts of other kernels.

e4m3 is encoded and decoded with integer arithmetic, which every architecture and the interpreter have
(conversion instructions begin with capability 8.9), to the same bits as torch.float8_e4m3fn.
"""
# Triton's language is typed by its compiler: pyright knows neither its values nor its constants.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl

INT8_MAX = tl.constexpr(127.0)
E4M3_MAX = tl.constexpr(448.0)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and taking it away rounds |x| < 2^22 to the nearest integer, ties to even."""


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    return (x + _ROUND) - _ROUND


@triton.jit
def e4m3_encode(x: tl.tensor) -> tl.tensor:
    """float32, finite, |x| <= 448 -> uint8. Rounds to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa to 3 bits, then move the exponent's bias from 127 to 7.
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9; 8 steps are the smallest normal number's code.
    small = round_even(tl.abs(x) * 512.0).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return (sign | code).to(tl.uint8)


@triton.jit
def e4m3_decode(code: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """uint8 -> dtype, times 2^-8: the code's bits are a float16's but for the exponent's bias."""
    wide = code.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(dtype)


E4M3_DECODE_SCALE = tl.constexpr(256.0)
"""Factor by which the result of `e4m3_decode` remains to be multiplied."""
