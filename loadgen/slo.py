"""The objectives of a request and whether it met them. Pure.

The terms are DistServe's (OSDI '24): *attainment* is the share of requests that meet their objectives, and an
*SLO scale* multiplies both objectives at once (section 6.2); below 1 they are more stringent.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.errors import SetupError
from loadgen.records import RequestOutcome, RequestRecord

NO_TARGET_S = math.inf
"""The value for "no target" of an option whose absence means something else."""
TARGET_S_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None means no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def meets_ttft(self, record: RequestRecord) -> bool:
        """True if it completed and its first token came in time."""
        if record.outcome is not RequestOutcome.COMPLETED:
            return False
        return self.ttft_s is None or (record.ttft_s is not None and record.ttft_s <= self.ttft_s)

    def meets_tpot(self, record: RequestRecord) -> bool:
        """True if it completed and its later tokens came in time. An answer of less than two tokens has no
        TPOT and meets any target."""
        if record.outcome is not RequestOutcome.COMPLETED:
            return False
        return self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s

    def is_met(self, record: RequestRecord) -> bool:
        return self.meets_ttft(record) and self.meets_tpot(record)

    def scaled(self, factor: float) -> "Slo":
        return Slo(_times(self.ttft_s, factor), _times(self.tpot_s, factor))

    def needed_scale(self, record: RequestRecord) -> float:
        """The least factor on both targets that lets the record meet them; infinite if none does."""
        if not self._without_bounds().is_met(record):
            return math.inf
        parts = ((record.ttft_s, self.ttft_s), (record.tpot_s, self.tpot_s))
        ratios = [
            _ratio(took_s, target_s)
            for took_s, target_s in parts
            if took_s is not None and target_s is not None
        ]
        return max(ratios, default=0.0)

    def _without_bounds(self) -> "Slo":
        return Slo(*(None if target is None else math.inf for target in (self.ttft_s, self.tpot_s)))

    def __str__(self) -> str:
        parts = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        parts = [f"{name} <= {target:g} s" for name, target in parts if target is not None]
        return ", ".join(parts) or "no targets: all completed"


@dataclass(frozen=True, slots=True)
class ClassObjectives:
    """Targets by service class. A class that is not named has the default."""

    default: Slo = Slo()
    by_class: Mapping[str, Slo] = field(default_factory=dict[str, Slo])

    def of(self, record: RequestRecord) -> Slo:
        return self.by_class.get(record.slo_class, self.default)

    def is_met(self, record: RequestRecord) -> bool:
        return self.of(record).is_met(record)

    @property
    def asks_nothing(self) -> bool:
        return all(slo == Slo() for slo in (self.default, *self.by_class.values()))

    def check_search(self) -> None:
        """Raises SetupError if there are no targets, because no rate would miss them."""
        if self.asks_nothing:
            raise SetupError("--search needs objectives: give --ttft-slo and --tpot-slo")

    def check_classes(self, known: Iterable[str]) -> None:
        """Raises SetupError for targets of a class that no request has."""
        found = sorted(set(known) - {""})
        for name in self.by_class:
            if name not in found:
                here = f"they have {', '.join(found)}" if found else "they have none"
                raise SetupError(f"--class-slo {name}: none of the requests is of this class; {here}")

    def scaled(self, factor: float) -> "ClassObjectives":
        by_class = {name: slo.scaled(factor) for name, slo in self.by_class.items()}
        return ClassObjectives(self.default.scaled(factor), by_class)


def parse_class_slo(text: str) -> tuple[str, Slo]:
    """Parse `chat=0.5/0.05`: TTFT and TPOT in seconds, `-` for none. Raises SetupError."""
    name, _, targets = text.partition("=")
    first, slash, rest = targets.partition("/")
    try:
        slo = Slo(_target(first), _target(rest))
    except ValueError:
        slo = None
    if not name or not slash or slo is None:
        raise SetupError(
            f"--class-slo {text!r}: write NAME=TTFT/TPOT in seconds, - for none, such as chat=0.5/0.05"
        )
    return name, slo


def slo_of(ttft_s: float | None, tpot_s: float | None) -> Slo:
    """Targets from options as `target_s` reads them."""
    return Slo(*(None if target_s == NO_TARGET_S else target_s for target_s in (ttft_s, tpot_s)))


def target_s(text: str) -> float:
    """Seconds, or `NO_TARGET_S` for `none`. Raises ValueError that says what to write."""
    if text.strip() in ("none", "-"):
        return NO_TARGET_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TARGET_S_MAX:
        raise ValueError(f"{text!r}: write seconds above 0, or none")
    return seconds


def _target(text: str) -> float | None:
    seconds = target_s(text)
    return None if seconds == NO_TARGET_S else seconds


def _times(target_s: float | None, factor: float) -> float | None:
    return None if target_s is None else target_s * factor


def _ratio(took_s: float, target_s: float) -> float:
    if target_s > 0:
        return took_s / target_s
    return 0.0 if took_s <= 0 else math.inf
