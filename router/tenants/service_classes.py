"""Service classes: the objectives of a request, and whether they were met. Pure.

Goodput is the requests that met their objectives over all that were offered, refusals included (DistServe,
Zhong et al., OSDI 2024). Every offered request ends in exactly one `RequestVerdict`.
"""

from enum import StrEnum, auto

import msgspec

from baton.config.router import SloConfig
from baton.core.errors import (
    BatonError,
    ClientError,
    DeadlineOver,
    NoCapacity,
    ObjectivesUnmet,
    Overloaded,
    QueueFull,
    RateLimited,
)
from router.openai.call import SloOptions
from router.tenants.keys import Tenant

HEADER = "x-baton-slo-class"
DEFAULT_TENANT = "default"
"""Tenant of all requests where no keys are configured."""


class RequestObjectives(msgspec.Struct, frozen=True):
    """Objectives of one request. An objective of 0 always holds."""

    slo_class: str = ""
    ttft_s: float = 0.0
    """Objective of the time from the request's arrival to its first token."""
    tpot_s: float = 0.0
    priority: int = 0
    refuse_late: bool = False
    """True if the request is not worth serving once its objectives are lost."""


NO_OBJECTIVES = RequestObjectives()
NO_RECORD = Tenant()


class ServiceClasses:
    """The choice of a request's class: as the request says, else its tenant's, else its model's, else the
    default."""

    def __init__(self, config: SloConfig) -> None:
        self._config = config

    def of(
        self,
        wish: SloOptions,
        *,
        header: str | None = None,
        tenant: str = "",
        record: Tenant = NO_RECORD,
        model: str,
    ) -> RequestObjectives:
        """Return the objectives of a request. `header` is the value of `HEADER`. Raises ClientError."""
        config = self._config
        name = self._named(wish, header, record.slo_classes)
        if not name:
            name = self._known(record.slo_class) or config.tenants.get(tenant) or config.models.get(model)
        name = name or config.default
        chosen = config.classes.get(name)
        objectives = RequestObjectives(refuse_late=config.late == "refuse")
        if chosen is not None:
            objectives = RequestObjectives(
                name, chosen.ttft_s, chosen.tpot_s, chosen.priority, (chosen.late or config.late) == "refuse"
            )
        ttft_s = objectives.ttft_s if wish.ttft_s is None else wish.ttft_s
        tpot_s = objectives.tpot_s if wish.tpot_s is None else wish.tpot_s
        return msgspec.structs.replace(objectives, ttft_s=ttft_s, tpot_s=tpot_s)

    def _named(self, wish: SloOptions, header: str | None, allowed: tuple[str, ...]) -> str:
        for param, name in (("baton.slo_class", wish.slo_class), (HEADER, header)):
            if name is None:
                continue
            if name not in self._config.classes:
                known = ", ".join(sorted(self._config.classes))
                has = f"this server has {known}" if known else "this server has none"
                raise ClientError(f"{param}: there is no class {name!r:.80}; {has}", param=param)
            if allowed and name not in allowed:
                may = ", ".join(allowed)
                raise ClientError(
                    f"{param}: this key's tenant may not use class {name}, but {may}", param=param
                )
            return name
        tier = self._known(wish.service_tier or "")
        return tier if not allowed or tier in allowed else ""

    def _known(self, name: str) -> str:
        return name if name in self._config.classes else ""


class RequestVerdict(StrEnum):
    MET = auto()
    """It completed, with both objectives met (or without any)."""
    MISSED_TTFT = auto()
    MISSED_TPOT = auto()
    MISSED_BOTH = auto()
    REFUSED_QUEUE = auto()
    """The admission queue was full."""
    REFUSED_SLO = auto()
    """It would have missed its objectives."""
    REFUSED_CAPACITY = auto()
    """No worker had room in time."""
    REFUSED_QUOTA = auto()
    """The tenant's own limits were reached."""
    DEADLINE = auto()
    FAILED = auto()
    CANCELLED = auto()
    """Its client cancelled it before its objectives were lost. That says nothing of the server."""


def verdict_of_answer(objectives: RequestObjectives, *, ttft_s: float, tpot_s: float) -> RequestVerdict:
    """Return the verdict on a request that completed. `tpot_s` is that of its slowest sequence, 0 for one
    token."""
    is_late = 0 < objectives.ttft_s < ttft_s
    is_slow = 0 < objectives.tpot_s < tpot_s
    if is_late:
        return RequestVerdict.MISSED_BOTH if is_slow else RequestVerdict.MISSED_TTFT
    return RequestVerdict.MISSED_TPOT if is_slow else RequestVerdict.MET


def verdict_of_error(error: BatonError) -> RequestVerdict | None:
    """Return the verdict on a request that failed. None: the request could never work, and does not count as
    offered."""
    match error:
        case ClientError():
            return None
        case RateLimited():
            return RequestVerdict.REFUSED_QUOTA
        case QueueFull():
            return RequestVerdict.REFUSED_QUEUE
        case ObjectivesUnmet():
            return RequestVerdict.REFUSED_SLO
        case NoCapacity() | Overloaded():
            return RequestVerdict.REFUSED_CAPACITY
        case DeadlineOver():
            return RequestVerdict.DEADLINE
        case _:
            return RequestVerdict.FAILED
