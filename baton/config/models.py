"""Several models in one cluster: the parts of the configuration that may differ between them."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from baton.config.base import Section

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,199}$"
OWN_SECTIONS = ("model", "engine", "experts", "cluster", "slo", "autoscale")
OWN_OF_CLUSTER = frozenset(
    {"prefill_workers", "decode_workers", "aggregated_workers", "shapes", "node_labels", "node_resources"}
)
NEVER_OWN = {
    "model": {"name": "the entry's key is the name that clients use"},
    "autoscale": {
        "mode": "it is one of all models",
        "interval_s": "all models are looked at together",
    },
}
"""Settings of these sections that a model cannot have for itself, with the reason."""

S = TypeVar("S", bound=Section)


class ModelEntry(Section):
    """One of several models: what differs for it from the sections of the same names, which hold for all."""

    model: dict[str, Any]
    """The model's `path`, and whatever else of `model` differs. Its name is the entry's key."""
    engine: dict[str, Any] = {}
    """Settings of `engine` for this model."""
    experts: dict[str, Any] = {}
    """Settings of `experts` for this model."""
    cluster: dict[str, Any] = {}
    """The model's pools: `prefill_workers`, `decode_workers`, `aggregated_workers`, `shapes`, `node_labels`,
    `node_resources`. With `aggregated_workers` alone the other two are 0."""
    slo: dict[str, Any] = {}
    """Settings of `slo` for this model: its service classes."""
    autoscale: dict[str, Any] = {}
    """Settings of `autoscale`: its bounds. `ranks_max` bounds this model here, and all models together in
    the section itself."""

    def own(self, section: str) -> dict[str, Any]:
        """Return what the entry says of a section. Raises ValueError for what it may not set."""
        own: dict[str, Any] = dict(getattr(self, section))
        for field in own:
            if section == "cluster" and field not in OWN_OF_CLUSTER:
                allowed = ", ".join(sorted(OWN_OF_CLUSTER))
                raise ValueError(f"cluster.{field}: a model has of its own only {allowed}")
            if reason := NEVER_OWN.get(section, {}).get(field):
                raise ValueError(f"{section}.{field}: {reason}; leave it out")
        pools = {"prefill_workers", "decode_workers"}
        if (
            section == "cluster"
            and own.get("aggregated_workers") not in (None, 0, "0")
            and not pools & own.keys()
        ):
            own |= {"prefill_workers": 0, "decode_workers": 0}
        return own


def with_own(section: S, own: Mapping[str, Any], *, where: str) -> S:
    """The section with these settings in place of its own. Raises ValueError, naming the setting."""
    try:
        return type(section).model_validate({**section.model_dump(), **own})
    except ValidationError as error:
        texts = [_text(where, detail) for detail in error.errors(include_url=False)]
        raise ValueError("; ".join(texts)) from None


def _text(where: str, detail: Any) -> str:
    name = ".".join([where, *(str(part) for part in detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return f"{name}: no such setting (see `baton config`)"
    if detail["type"] == "value_error":
        return f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    return f"{name}: {detail['msg']}, not {detail['input']!r:.80}"
