"""Settings of how many workers there should be."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.config.base import Seconds, Section


class AutoscaleConfig(Section):
    """How many workers there should be. `baton simulate --autoscale` reads it too, whatever the mode."""

    mode: Literal["off", "advise", "on"] = "off"
    """off: nothing happens. advise: the control plane logs what it would order, see `baton status`. on: it
    orders it. The workers that `cluster` asks for are those it begins with."""

    prefill_min: Annotated[int, Field(ge=0, le=1024)] = 1
    """Least number of workers of the role, those that start included."""
    prefill_max: Annotated[int, Field(ge=1, le=1024)] = 8
    """Largest number of workers of the role."""
    decode_min: Annotated[int, Field(ge=0, le=1024)] = 1
    decode_max: Annotated[int, Field(ge=1, le=1024)] = 8
    aggregated_min: Annotated[int, Field(ge=0, le=1024)] = 1
    aggregated_max: Annotated[int, Field(ge=1, le=1024)] = 8
    """Largest number of aggregated workers, where there are any."""
    ranks_max: Annotated[int, Field(ge=0, le=196_608)] = 0
    """Largest number of ranks (on GPUs: of devices) of the workers of all roles and all `models` together. A
    worker of shape tp4 counts four. Expert ranks count as well, unless they share the cores of workers. 0:
    only the bounds of roles, which count workers. When it binds, all roles of a model are short alike, and a
    model gets what the others leave."""
    rank_hours_per_day: Annotated[float, Field(ge=0)] = 0.0
    """Budget of hours of ranks over any 24 hours. A worker of shape tp4 spends four an hour. 0: no budget. It
    does not bind while more than half of it is left; then the rest is spread over the time until the hours
    spent first are a day old. Minima are kept."""
    attain: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    """Part of the requests that should meet their objectives (`slo.classes`)."""
    interval_s: Annotated[float, Field(ge=1, le=300)] = 15.0
    """Seconds between two decisions."""
    window_s: Annotated[float, Field(ge=1, le=3600)] = 120.0
    """Seconds over which rates are averaged. Lengths and cached shares are averaged over half as much more.
    """
    caution: Annotated[float, Field(ge=0.5, le=0.99)] = 0.75
    """Quantile of the forecast, by its own recent errors, that there are enough workers for."""
    headroom: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Keep enough workers for this many times the last hour's load, so that spikes are absorbed. 1: none
    extra."""
    patience_s: Annotated[float, Field(ge=0, le=3600)] = 300.0
    """Workers are stopped when fewer were enough for this long. It is longer where starts are slow, and after
    a mistake."""
    zero_after_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Workers are stopped after this long without a request, once all of them serve, if no role has a
    minimum. 0: never. Routers hold what comes then for `router.queue_wait_s`, so there is no scaling to zero
    where starts take more than four fifths of that."""
    season_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    """Period after which load repeats itself, such as 86400. 0: no known period."""
    start_s: Seconds = 60.0
    """Assumed seconds from starting a worker until it serves. Measured starts replace it, as with the next
    two."""
    drain_s: Seconds = 20.0
    """Assumed seconds from draining a worker until it is idle."""
    switch_s: Seconds = 20.0
    """Assumed seconds from draining a worker until it serves in another role. Roles are not switched where
    that takes longer than a start."""

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no worker at all, until the next request brings some back."""
        has_no_minimum = self.aggregated_min == 0 or self.prefill_min == self.decode_min == 0
        return self.mode == "on" and self.zero_after_s > 0 and has_no_minimum

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "AutoscaleConfig":
        for role in ("prefill", "decode", "aggregated"):
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if least > most:
                raise ValueError(f"{role}_min: {least} is above {role}_max, {most}")
        return self
