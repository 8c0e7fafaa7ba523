"""The requests of a trace, whatever file format it came from. Pure values."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens per `hash_id` in Mooncake's traces."""

SMALL_BLOCK_TOKENS = 16
"""Prompt tokens per `hash_id` in Bailian's traces, and in RAGPulse's once their components are cut into
blocks."""

TOKENS_MAX = 100_000_000
"""Longest prompt or answer in tokens. A larger number is a mistake in the file."""

YEAR_S = 365.25 * 86_400
SPAN_YEARS_MAX = 10
"""Longest time between two requests of a file, in years."""
INSTANT_S_MAX = 1e12
"""Largest instant in seconds. A larger float cannot resolve a tenth of a millisecond."""

_SHARED_INSTANTS_SHARE = 0.5
"""A trace is on a grid if more than this share of its requests have the same instant as another one."""


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    """Mooncake's format, and Baton's own, which adds fields to it; see `loadgen.formats.mooncake`."""
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
    """Seconds since the first request of the file; after `cut`, since the start of the slice."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One id per block from the start of the prompt. It is empty if the trace does not record them; then no
    prefix is shared. Tokens that no id covers belong to the request alone."""
    row: int = 0
    """Row number in the file, from 0; `parent_row` of other requests refers to it."""
    session: str | None = None
    """The conversation that the request belongs to; None if it stands alone."""
    turn: int = 0
    """Turn within the session, from 0."""
    parent_row: int | None = None
    """Row of the earlier turn; None for the first turn, and without a session."""
    elapsed_s: float | None = None
    """Seconds that the recorded system took for the answer; None if not recorded."""
    think_s: float | None = None
    """Seconds from the end of the earlier turn to this one, if the trace records them."""
    slo_class: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that cannot be replayed: the request failed when the trace was recorded, so it has no length."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    format: TraceFormat
    requests: tuple[TraceRequest, ...]
    """Requests in order of arrival; equal instants keep the order of the file."""
    block_tokens: int | None = None
    """Prompt tokens per hash_id; None means the format's own number (`hash_block_tokens`)."""
    skipped_at_s: tuple[float, ...] = ()
    """Instants of rows left out: requests that failed when the trace was recorded, and so have no length."""

    @property
    def hash_block_tokens(self) -> int:
        """Prompt tokens per hash_id; 0 if the trace has no prefixes."""
        return _BLOCK_TOKENS.get(self.format, 0) if self.block_tokens is None else self.block_tokens

    @property
    def has_prefixes(self) -> bool:
        return self.hash_block_tokens > 0

    @property
    def has_sessions(self) -> bool:
        return any(r.parent_row is not None for r in self.requests)

    @property
    def tick_s(self) -> float:
        """Width of the grid that arrivals lie on; 0 if there is none. Some releases of Mooncake's traces
        stamp requests every 3 s, BurstGPT and RAGPulse every second."""
        return measured_tick_s(r.at_s for r in self.requests)


def measured_tick_s(instants_s: Iterator[float]) -> float:
    """The median gap between two distinct instants, if most requests have the same instant as another one;
    else 0."""
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
    """Checks the instants of one file against each other."""

    first_s: float | None = None

    def checked(self, at_s: float, name: str) -> float:
        """Raises ValueError for a trace of implausible length, because a replay of it would never end."""
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


class SessionTurns:
    """Numbers the requests of each session of one file."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        """Row and turn of each session's last request."""

    def place(self, session: str | None, row: int) -> tuple[int, int | None]:
        """The request's turn, from 0, and the row of the turn before it; (0, None) without a session."""
        if session is None:
            return 0, None
        before = self._last.get(session)
        turn = before[1] + 1 if before else 0
        self._last[session] = (row, turn)
        return turn, before[0] if before else None


def required(fields: Mapping[str, object], names: Iterable[str], what: str) -> None:
    """Raises ValueError if a field is missing."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise ValueError(f"this is not {what}: no field {', '.join(missing)}")


def whole(value: object, name: str, *, least: int) -> int:
    """`value`, if it is a whole number of at least `least`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, is {value!r}")
    return value


def tokens(value: object, name: str, *, least: int) -> int:
    """A length in tokens. Raises ValueError."""
    count = whole(value, name, least=least)
    if count > TOKENS_MAX:
        raise ValueError(f"{name} must be at most {TOKENS_MAX:,} tokens, is {count}")
    return count


def tokens_in(text: str, name: str, *, least: int) -> int:
    """A length in tokens, from the text of a cell. Raises ValueError."""
    number = finite(text, name)
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number of at least {least}, is {text!r}")
    return tokens(int(number), name, least=least)


def finite(value: object, name: str) -> float:
    """A finite number, or text that is one. Raises ValueError."""
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if abs(number) < float("inf"):
            return number
    raise ValueError(f"{name} must be a number, is {value!r}")
