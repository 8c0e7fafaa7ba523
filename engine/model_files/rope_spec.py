"""Rotary position embedding as config.json describes it. No torch here; `rope` computes it."""

from typing import Literal

import msgspec

from baton.core.errors import SetupError
from engine.model_files.fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeSpec(msgspec.Struct, frozen=True):
    """RoFormer (arXiv 2104.09864), and the ways to stretch it.

    linear: position interpolation (arXiv 2306.15595). dynamic: NTK-aware base. yarn: arXiv 2309.00071.
    llama3: the smoothed interpolation of Llama 3.1. longrope: arXiv 2402.13753.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    """The first so many dimensions of a head are rotated."""
    factor: float = 1.0
    original_context_tokens: int = 0
    """Context of the pretraining; not for default."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn, longrope: what cos and sin are multiplied with; None: from the factor (and mscale)."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """longrope: wavelengths are multiplied by these for sequences up to the original context …"""
    long_factors: tuple[float, ...] = ()
    """… and by these beyond it. [rotary_dim / 2]"""

    @property
    def depends_on_context(self) -> bool:
        """True if the longest admitted sequence decides how every position is rotated."""
        return self.kind in ("dynamic", "longrope")


def read_rope(fields: Fields, head_dim: int, *, renamed: dict[str, RopeKind] | None = None) -> RopeSpec:
    """transformers 5 writes `rope_parameters`; older folders have `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    return rope_from(fields.nested(name), fields, head_dim, renamed=renamed)


def rope_from(
    params: Fields, fields: Fields, head_dim: int, *, renamed: dict[str, RopeKind] | None = None
) -> RopeSpec:
    """params: the object with the parameters; what it leaves out is looked for in `fields`."""
    kind = _kind(params, renamed or {})
    context_tokens = fields.integer("max_position_embeddings")
    partial = params.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise SetupError(
            f"{params.where}: partial_rotary_factor {partial} of {head_dim} must give an even number"
        )
    theta = params.positive("rope_theta", fields.positive("rope_theta", 10_000.0))
    if kind == "default":
        return RopeSpec(kind=kind, theta=theta, rotary_dim=rotary_dim)
    if kind == "dynamic" and rotary_dim == 2:
        raise SetupError(f"{params.where}: dynamic needs more than 2 rotated dimensions")
    original = context_tokens
    if kind in ("llama3", "yarn", "longrope"):
        inner = params.integer("original_max_position_embeddings", context_tokens)
        original = fields.integer("original_max_position_embeddings", inner)
    stretch = context_tokens / original if kind in ("yarn", "longrope") else None
    low = params.positive("low_freq_factor", None if kind == "llama3" else 1.0)
    high = params.positive("high_freq_factor", None if kind == "llama3" else 4.0)
    if kind == "llama3" and low >= high:
        raise SetupError(f"{params.where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return RopeSpec(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        factor=params.positive("factor", stretch),
        original_context_tokens=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=params.positive("beta_fast", 32.0),
        beta_slow=params.positive("beta_slow", 1.0),
        attention_factor=params.number("attention_factor") if params.has("attention_factor") else None,
        mscale=params.number("mscale", 0.0),
        mscale_all_dim=params.number("mscale_all_dim", 0.0),
        truncate=params.flag("truncate", True),
        short_factors=_factors(params, "short_factor", kind, rotary_dim),
        long_factors=_factors(params, "long_factor", kind, rotary_dim),
    )


def _kind(params: Fields, renamed: dict[str, RopeKind]) -> RopeKind:
    name: object = params.data.get("rope_type") or params.data.get("type")
    nested = [key for key, value in params.data.items() if isinstance(value, dict)]
    for kind in ROPE_KINDS:
        if renamed.get(str(name), name) == kind or (name is None and kind == "default" and not nested):
            return kind
    what = f"per layer type ({', '.join(nested):.100})" if nested else f"type {name!s:.100}"
    raise SetupError(f"{params.where}: {what} is not supported; supported are {', '.join(ROPE_KINDS)}")


def _factors(params: Fields, name: str, kind: RopeKind, rotary_dim: int) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    factors = params.numbers(name)
    if any(factor <= 0 for factor in factors):
        raise SetupError(f"{params.where}: {name} must be above 0")
    if len(factors) != rotary_dim // 2:
        raise SetupError(f"{params.where}: {name} must have {rotary_dim // 2} numbers, has {len(factors)}")
    return factors
