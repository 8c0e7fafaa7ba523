"""The record of each request, so small that a million of them fit."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from simulator.fleet.workload import FleetRequest

OUTCOMES = (RequestOutcome.COMPLETED, RequestOutcome.REFUSED, RequestOutcome.FAILED)
ERRORS: tuple[ErrorKind | None, ...] = (None, ErrorKind.OVERLOADED, ErrorKind.HTTP, ErrorKind.TIMEOUT)
NEVER = float("nan")
TIMINGS_MAX = 200_000
STAGES_MAX = 16


class Names:
    """Small numbers for strings that come again and again."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self.names: list[str] = []

    def number(self, name: str) -> int:
        found = self._number.get(name)
        if found is None:
            found = self._number[name] = len(self.names)
            self.names.append(name)
        return found


class Timings:
    """Seconds of stages by name, for the requests that have them."""

    def __init__(self) -> None:
        self._keys: tuple[str, ...] = ()
        self._values = array("f")
        self._position: dict[int, int] = {}

    @property
    def count(self) -> int:
        return len(self._position)

    def add(self, request: int, timings: dict[str, float]) -> None:
        self._keys += tuple(key for key in timings if key not in self._keys)
        if len(self._keys) > STAGES_MAX:
            raise AssertionError(f"more than {STAGES_MAX} stages: {self._keys}")
        self._position[request] = len(self._values)
        values = [timings.get(key, NEVER) for key in self._keys]
        self._values.extend(values + [NEVER] * (STAGES_MAX - len(values)))

    def of(self, request: int) -> dict[str, float] | None:
        start = self._position.get(request)
        if start is None:
            return None
        values = self._values[start : start + STAGES_MAX]
        return {key: value for key, value in zip(self._keys, values, strict=False) if value == value}


class RequestStats(Sequence[RequestRecord]):
    """Columns of about 90 bytes per request, read as `RequestRecord`s that are made when asked for."""

    def __init__(self) -> None:
        self._index = array("q")
        self._times = array("d")
        """Four numbers per request: planned, first token, last token, end."""
        self._counts = array("i")
        """Four numbers per request: prompt tokens, generated tokens, cached tokens, prompt tokens
        computed."""
        self._codes = array("h")
        """Seven numbers per request: outcome, error, class, tenant, prefill worker, decode worker,
        attempts."""
        self._names = Names()
        self._details: dict[int, int] = {}
        self._timed = Timings()

    def add(
        self,
        request: FleetRequest,
        *,
        outcome: RequestOutcome,
        error: ErrorKind | None,
        detail: str,
        first_s: float,
        last_s: float,
        ended_s: float,
        generated: int,
        cached: int,
        computed: int,
        served_by: tuple[str, ...],
        attempts: int,
        timings: dict[str, float] | None = None,
    ) -> None:
        """Add a request. `timings` are kept for the first `TIMINGS_MAX` requests that have some."""
        names = self._names
        if detail:
            self._details[len(self._index)] = names.number(detail)
        if timings and self._timed.count < TIMINGS_MAX:
            self._timed.add(len(self._index), timings)
        self._index.append(request.number)
        self._times.extend((request.at_s, first_s, last_s, ended_s))
        self._counts.extend((request.input_tokens, generated, cached, computed))
        prefill = names.number(served_by[0]) if served_by else -1
        decode = names.number(served_by[1]) if len(served_by) > 1 else -1
        slo_class, tenant = names.number(request.slo_class), names.number(request.tenant)
        codes = (OUTCOMES.index(outcome), ERRORS.index(error), slo_class, tenant, prefill, decode, attempts)
        self._codes.extend(codes)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, position: int) -> RequestRecord: ...

    @overload
    def __getitem__(self, position: slice) -> list[RequestRecord]: ...

    def __getitem__(self, position: int | slice) -> RequestRecord | list[RequestRecord]:
        if isinstance(position, slice):
            return [self._record(i) for i in range(*position.indices(len(self)))]
        return self._record(range(len(self))[position])

    def __iter__(self) -> Iterator[RequestRecord]:
        return map(self._record, range(len(self)))

    def computed_tokens(self, position: int) -> int:
        """Return the prompt tokens that workers computed for a request, on all attempts."""
        return self._counts[4 * position + 3]

    def _record(self, i: int) -> RequestRecord:
        planned_s, first_s, last_s, ended_s = self._times[4 * i : 4 * i + 4]
        prompt, generated, cached, _ = self._counts[4 * i : 4 * i + 4]
        outcome, error, slo_class, tenant, prefill, decode, attempts = self._codes[7 * i : 7 * i + 7]
        names = self._names.names
        instants = [at_s for at_s in (first_s, last_s) if at_s == at_s]
        return RequestRecord(
            self._index[i],
            planned_s,
            sent_s=planned_s,
            token_instants_s=instants,
            ended_s=ended_s,
            outcome=OUTCOMES[outcome],
            error=ERRORS[error],
            detail=names[self._details[i]] if i in self._details else "",
            finish_reason="length" if OUTCOMES[outcome] is RequestOutcome.COMPLETED else None,
            prompt_tokens=prompt,
            completion_tokens=generated,
            cached_tokens=cached if cached >= 0 else None,
            slo_class=names[slo_class],
            tenant=names[tenant],
            timings=self._timed.of(i),
            served_by=tuple(names[number] for number in (prefill, decode) if number >= 0),
            attempts=attempts,
        )
