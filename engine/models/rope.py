"""Frequencies of the rotary position embedding, one per pair of head dimensions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_files.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Frequencies:
    radians_per_position: Tensor
    """float32 [rotary_dim / 2]."""
    amplitude: float
    """cos and sin are multiplied with it (YaRN's and LongRoPE's attention temperature)."""

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> cos, sin, float32 [T, rotary_dim / 2]."""
        angles = positions.to(torch.float32)[:, None] * self.radians_per_position
        # In float64: torch's float32 versions differ in the last bit between the elements it computes with
        # vector instructions and those it does not, so a token's would depend on its place in the batch.
        exact = angles.double()
        return (exact.cos() * self.amplitude).float(), (exact.sin() * self.amplitude).float()


def frequencies(rope: RopeSpec, *, context_tokens: int, device: torch.device) -> Frequencies:
    """`context_tokens` is the longest sequence this engine admits.

    A key is rotated once and then cached, shared and handed to other workers, so its rotation must
    depend on its position alone. Dynamic NTK scaling and LongRoPE as published change all frequencies
    when a sequence grows past the original context; here they are those of a sequence of
    `context_tokens`, from the first token on. Up to the original context that is the same thing.
    """
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    base, amplitude = rope.theta, 1.0
    if rope.kind == "dynamic":
        longest = max(context_tokens, rope.original_context_tokens)
        stretch = rope.factor * longest / rope.original_context_tokens - (rope.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    scaled = 1.0 / base**exponents
    match rope.kind:
        case "default" | "dynamic":
            pass
        case "linear":
            scaled = scaled / rope.factor
        case "llama3":
            scaled = _llama3(rope, scaled)
        case "yarn":
            scaled, amplitude = _yarn(rope, scaled), _yarn_amplitude(rope)
        case "longrope":
            is_long = context_tokens > rope.original_context_tokens
            factors = rope.long_factors if is_long else rope.short_factors
            scaled = 1.0 / (torch.tensor(factors, dtype=torch.float32) * base**exponents)
            amplitude = _longrope_amplitude(rope)
    return Frequencies(scaled.to(device), amplitude)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are interpolated, short ones kept, those between mixed linearly."""
    turns = rope.original_context_tokens * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """NTK-by-parts, arXiv 2309.00071 section 3.2: dimensions that turn often are kept."""

    def dimension(turns: float) -> float:
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_amplitude(rope: RopeSpec) -> float:
    """arXiv 2309.00071 section 3.4; the quotient of two temperatures is DeepSeek's form."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _longrope_amplitude(rope: RopeSpec) -> float:
    """arXiv 2402.13753, as Phi-3 computes it: the same for both sets of factors."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context_tokens))
