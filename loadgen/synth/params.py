"""The parameters of a synthetic trace and their file: a few KB of TOML, meant to be read and edited.

Distributions are given by their quantiles (`Quantiles`), because production lengths have several modes and
fit no family. The dependence between input and output lengths is given by the correlation of a Gaussian
copula.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from baton.core.errors import SetupError

LEVELS = (
    *(0.0, 0.001, 0.005, 0.01, 0.02, 0.03),
    *(k / 40 for k in range(2, 39)),
    *(0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999, 1.0),
)
"""The levels of every `Quantiles`."""

SCHEMA = "baton-synth/1"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of numbers of at least 0, linear in log(1 + x) between its quantiles at `LEVELS`."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Quantiles":
        """The quantiles of a sample, rounded to four digits, because they describe it and do not copy it. An
        empty sample gives zeros."""
        if not len(sample):
            return cls((0.0,) * len(LEVELS))
        found = np.quantile(np.asarray(sample, dtype=np.float64), LEVELS)
        return cls(tuple(_rounded(float(v)) for v in found))

    def at(self, level: float) -> float:
        """The value that a share `level` of the distribution is below."""
        logs = [math.log1p(v) for v in self.values]
        return math.expm1(float(np.interp(level, LEVELS, logs)))

    def table(self) -> "Inverse":
        return Inverse(np.log1p(np.array(self.values)))


class Inverse:
    """A fast `Quantiles.at` for many calls."""

    def __init__(self, logs: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
        fine = np.linspace(0.0, 1.0, 4097)
        self._values = [math.expm1(v) for v in np.interp(fine, LEVELS, logs).tolist()]

    def at(self, level: float) -> float:
        place = level * 4096
        k = min(4095, int(place))
        below, above = self._values[k], self._values[k + 1]
        return below + (above - below) * (place - k)

    def draw(self, rng: Random) -> float:
        return self.at(rng.random())


@dataclass(frozen=True, slots=True)
class FitSource:
    """The trace that the numbers were fitted to."""

    name: str = ""
    url: str = ""
    licence: str = ""
    requests: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A Gamma renewal process whose rate has a slow profile and, around it, a log-normal AR(1) modulation."""

    rate_per_s: float = 1.0
    shape: float = 1.0
    """Shape of the Gamma gaps at a steady rate: 1 is Poisson, less is bursty."""
    modulation: float = 0.0
    """Standard deviation of the logarithm of the rate."""
    modulation_s: float = 1.0
    """Seconds in which the correlation of the rate falls to 1/e."""
    profile: tuple[float, ...] = (1.0,)
    """Rate relative to the mean, in equal parts of `profile_s`; the profile repeats."""
    profile_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Input and output tokens of one kind of request, and the correlation of their copula."""

    input: Quantiles
    output: Quantiles
    correlation: float = 0.0


@dataclass(frozen=True, slots=True)
class Head:
    """A prefix that unrelated requests share, such as a system prompt."""

    share: float
    """Share of the requests that are not turns."""
    blocks: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Requests whose prompt begins with the whole prompt of an earlier one."""

    share: float
    lag_s: Quantiles
    """Seconds since the request that is continued."""
    growth: LengthModel
    """Its `input` is the growth beyond the earlier prompt."""
    repeat: float
    """Share of turns that add nothing and repeat the prompt."""
    shared: float
    """Share of turns whose earlier request was continued before."""
    by_turn: tuple[float, ...]
    """Relative chance to be continued, of first requests, second turns and so on. The last value stands for
    all later turns."""
    by_length: tuple[float, ...]
    """Relative chance to be continued by prompt length, at `length_blocks`."""
    length_blocks: tuple[int, ...]
    """Upper ends, in blocks, of all but the last of `by_length`."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Requests that share the beginning of an earlier prompt, but not all of it."""

    share: float
    lag_s: Quantiles
    kept: Quantiles
    """Share of the earlier prompt's blocks that is shared."""
    lengths: LengthModel


@dataclass(frozen=True, slots=True)
class SynthParams:
    source: FitSource
    arrivals: Arrivals
    block_tokens: int
    """Tokens per block; 0 if the trace has no prefixes."""
    input_tokens_max: int
    """No prompt grows beyond this."""
    heads: tuple[Head, ...]
    fresh: LengthModel
    """Lengths of requests that share at most a head."""
    turns: Turns | None
    branches: Branches | None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def to_toml(params: SynthParams) -> str:
    """The text that `from_toml` reads."""
    lines = [f'schema = "{SCHEMA}"']
    _write(lines, "", params)
    return "\n".join(lines) + "\n"


def _write(lines: list[str], name: str, value: Any) -> None:
    tables: list[tuple[str, Any]] = []
    for f in fields(value):
        item = getattr(value, f.name)
        if item is None:
            continue
        if isinstance(item, Quantiles):
            lines.append(f"{f.name} = {_plain(item.values)}")
        elif isinstance(item, tuple) and item and isinstance(item[0], Head):
            pairs = cast("tuple[Head, ...]", item)
            lines.append(f"{f.name} = {_plain([[h.share, h.blocks] for h in pairs])}")
        elif hasattr(item, "__dataclass_fields__"):
            tables.append((f.name, item))
        else:
            lines.append(f"{f.name} = {_plain(item)}")
    for key, item in tables:
        path = f"{name}.{key}" if name else key
        lines += ["", f"[{path}]"]
        _write(lines, path, item)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(v) for v in cast("Sequence[object]", value)) + "]"
    if isinstance(value, float):
        return f"{value:.1f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)


def from_toml(text: str, *, name: str) -> SynthParams:
    """Raises SetupError that names the file and what is wrong."""
    try:
        table = tomllib.loads(text)
        if table.get("schema") != SCHEMA:
            raise ValueError(f'schema must be "{SCHEMA}"')
        return _params(table)
    except (ValueError, TypeError, KeyError) as error:  # tomllib's error is a ValueError
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise SetupError(f"{name}: not parameters of `baton synth`: {what}") from None


def read_params(path: Path) -> SynthParams:
    """Raises SetupError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read {path}: {error}") from None
    return from_toml(text, name=str(path))


def _params(table: Mapping[str, Any]) -> SynthParams:
    arrivals = dict(table["arrivals"])
    arrivals["profile"] = tuple(_numbers(arrivals.get("profile", [1.0])))
    made = SynthParams(
        source=FitSource(**table.get("source", {})),
        arrivals=Arrivals(**arrivals),
        block_tokens=int(table["block_tokens"]),
        input_tokens_max=int(table["input_tokens_max"]),
        heads=tuple(Head(float(share), int(blocks)) for share, blocks in table.get("heads", [])),
        fresh=_lengths(table["fresh"]),
        turns=_turns(table["turns"]) if "turns" in table else None,
        branches=_branches(table["branches"]) if "branches" in table else None,
    )
    _check(made)
    return made


def _turns(table: Mapping[str, Any]) -> Turns:
    return Turns(
        share=float(table["share"]),
        lag_s=_quantiles(table, "lag_s"),
        growth=_lengths(table["growth"]),
        repeat=float(table.get("repeat", 0.0)),
        shared=float(table.get("shared", 0.0)),
        by_turn=tuple(_numbers(table.get("by_turn", [1.0]))),
        by_length=tuple(_numbers(table.get("by_length", [1.0]))),
        length_blocks=tuple(int(v) for v in _numbers(table.get("length_blocks", []))),
    )


def _branches(table: Mapping[str, Any]) -> Branches:
    return Branches(
        float(table["share"]),
        _quantiles(table, "lag_s"),
        _quantiles(table, "kept"),
        _lengths(table["lengths"]),
    )


def _lengths(table: Mapping[str, Any]) -> LengthModel:
    return LengthModel(
        _quantiles(table, "input"), _quantiles(table, "output"), float(table.get("correlation", 0.0))
    )


def _quantiles(table: Mapping[str, Any], name: str) -> Quantiles:
    values = tuple(_numbers(table[name]))
    if len(values) != len(LEVELS) or any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must be {len(LEVELS)} rising numbers, of at least 0")
    return Quantiles(values)


def _numbers(values: Any) -> list[float]:
    numbers = [float(v) for v in values]
    if not numbers and not isinstance(values, list):
        raise ValueError("not a list of numbers")
    if any(not 0 <= v < math.inf for v in numbers):
        raise ValueError("numbers must be 0 or more")
    return numbers


def _check(made: SynthParams) -> None:
    a = made.arrivals
    positive = (a.rate_per_s, a.shape, a.modulation_s, a.profile_s, sum(a.profile), made.input_tokens_max)
    if any(not 0 < v < math.inf for v in positive) or not 0 <= a.modulation < 10 or made.block_tokens < 0:
        raise ValueError("rates, shapes, times and lengths must be above 0")
    lengths = [made.fresh]
    lengths += [made.turns.growth] if made.turns else []
    lengths += [made.branches.lengths] if made.branches else []
    if any(not -1 <= part.correlation <= 1 for part in lengths):
        raise ValueError("correlation must be from -1 to 1")
    shares = (made.turns.share if made.turns else 0.0) + (made.branches.share if made.branches else 0.0)
    if not 0 <= shares <= 1 or sum(h.share for h in made.heads) > 1.001:
        raise ValueError("shares must not add up to more than 1")
    if made.turns and len(made.turns.by_length) != len(made.turns.length_blocks) + 1:
        raise ValueError("by_length must have one number more than length_blocks")


__all__ = [
    "LEVELS",
    "SCHEMA",
    "Arrivals",
    "Branches",
    "FitSource",
    "Head",
    "Inverse",
    "LengthModel",
    "Quantiles",
    "SynthParams",
    "Turns",
    "from_toml",
    "read_params",
    "to_toml",
]  # fmt: skip
