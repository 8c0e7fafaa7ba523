"""What a trace says of its requests, whatever file it came from. Pure values."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens behind one `hash_id` of Mooncake's traces."""

SMALL_BLOCK_TOKENS = 16
"""The same for Bailian's traces, and for RAGPulse's components once they are cut into blocks."""

TOKENS_MAX = 100_000_000
"""Of one prompt or answer: what is longer is a slip of whoever wrote the file."""

YEAR_S = 365.25 * 86_400
SPAN_YEARS_MAX = 10
"""Between two requests of a file."""
INSTANT_S_MAX = 1e12
"""Beyond it, a float does not tell a tenth of a millisecond."""

_SHARED_INSTANTS_SHARE = 0.5
"""A trace sits on a grid when more than this share of its requests share their instant with another."""


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    """Also Baton's own, which adds fields to it; see `loadgen.formats.mooncake`."""
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    BAILIAN = "bailian"
    RAGPULSE = "ragpulse"


_BLOCK_TOKENS = {
    TraceFormat.MOONCAKE: TRACE_BLOCK_TOKENS,
    TraceFormat.BAILIAN: SMALL_BLOCK_TOKENS,
    TraceFormat.RAGPULSE: SMALL_BLOCK_TOKENS,
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float
    """Since the first request of the file; since the start of the slice after `cut`."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One per block from the start of
    the prompt. Empty: the trace does not say, and no prefix is shared. Tokens that no id covers are the
    request's own."""
    row: int = 0
    """Its number in the file, from 0: what `parent_row` of others refers to."""
    session: str | None = None
    """Conversation it belongs to; None: it stands alone."""
    turn: int = 0
    """Of its session, from 0."""
    parent_row: int | None = None
    """The turn before; None: the first, or no session."""
    elapsed_s: float | None = None
    """How long the recorded system took over the answer; None: not recorded."""
    think_s: float | None = None
    """From the end of the turn before to this one, where the trace says so."""
    slo_class: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is no request to replay: it failed when the trace was recorded, and so has no length."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    format: TraceFormat
    requests: tuple[TraceRequest, ...]
    """In order of arrival; equal instants keep the order of the file."""
    block_tokens: int | None = None
    """Prompt tokens behind one hash_id; None: the format's own (`hash_block_tokens`)."""
    skipped_at_s: tuple[float, ...] = ()
    """Instants of rows left out: requests that failed when the trace was recorded, and so have no length."""

    @property
    def hash_block_tokens(self) -> int:
        """Prompt tokens behind one hash_id; 0: the trace knows no prefixes."""
        return _BLOCK_TOKENS.get(self.format, 0) if self.block_tokens is None else self.block_tokens

    @property
    def has_prefixes(self) -> bool:
        return self.hash_block_tokens > 0

    @property
    def has_sessions(self) -> bool:
        return any(r.parent_row is not None for r in self.requests)

    @property
    def tick_s(self) -> float:
        """Width of the grid the arrivals sit on; 0: none. Some releases of Mooncake's traces stamp requests
        every 3 s, BurstGPT and RAGPulse every second."""
        return measured_tick_s(r.at_s for r in self.requests)


def measured_tick_s(instants_s: Iterator[float]) -> float:
    """The median gap between two distinct instants, if most requests share theirs with another; else 0."""
    distinct: list[float] = []
    sizes: list[int] = []
    for at_s in instants_s:
        if distinct and distinct[-1] == at_s:
            sizes[-1] += 1
        else:
            distinct.append(at_s)
            sizes.append(1)
    shared = sum(size for size in sizes if size > 1)
    if len(distinct) < 2 or shared <= _SHARED_INSTANTS_SHARE * sum(sizes):
        return 0.0
    return median(b - a for a, b in pairwise(distinct))


@dataclass(slots=True)
class Times:
    """Holds the instants of one file together."""

    first_s: float | None = None

    def checked(self, at_s: float, name: str) -> float:
        """Raises ValueError: nobody's trace is so long, and who follows its time would not come to an end."""
        if abs(at_s) > INSTANT_S_MAX:
            raise ValueError(
                f"{name} must be an instant in seconds of at most {INSTANT_S_MAX:g}, is {at_s:g}"
            )
        if self.first_s is None:
            self.first_s = at_s
        years = abs(at_s - self.first_s) / YEAR_S
        if years > SPAN_YEARS_MAX:
            raise ValueError(f"{name} is {years:.3g} years from the first row's; at most {SPAN_YEARS_MAX}")
        return at_s


def required(fields: Mapping[str, object], names: Iterable[str], what: str) -> None:
    """Raises ValueError: they are not all there."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise ValueError(f"this is not {what}: no field {', '.join(missing)}")


def whole(value: object, name: str, *, least: int) -> int:
    """`value` if it is a whole number of at least `least`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, is {value!r}")
    return value


def tokens(value: object, name: str, *, least: int) -> int:
    """A length. Raises ValueError."""
    count = whole(value, name, least=least)
    if count > TOKENS_MAX:
        raise ValueError(f"{name} must be at most {TOKENS_MAX:,} tokens, is {count}")
    return count


def tokens_in(text: str, name: str, *, least: int) -> int:
    """A length in a cell. Raises ValueError."""
    number = finite(text, name)
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number of at least {least}, is {text!r}")
    return tokens(int(number), name, least=least)


def finite(value: object, name: str) -> float:
    """A number, or text that is one. Raises ValueError."""
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if abs(number) < float("inf"):
            return number
    raise ValueError(f"{name} must be a number, is {value!r}")
