"""Problems that an operator should look at now, in words. Pure."""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from baton.core.experts import ExpertGroupState
from baton.core.operate import ClusterState, ReplicaState, ReplicaStatus
from baton.telemetry import catalogue as c
from control_plane.dashboard.derive import level
from control_plane.dashboard.samples import MetricsFrame
from control_plane.dashboard.text import plural, span
from control_plane.expert_summary import ready_count

SHOWN_MAX = 6


class Trouble(msgspec.Struct, frozen=True):
    level: Literal["bad", "warn"]
    text: str


def troubles(
    state: ClusterState | None,
    now: MetricsFrame | None,
    *,
    control: str,
    silent_s: float,
    unreadable: Iterable[str],
) -> list[Trouble]:
    """Return the problems. `control` is the error of the control plane, empty if there is none; `silent_s` is
    the time since its last report. `unreadable` lists processes whose metrics cannot be read."""
    found: list[Trouble] = []
    if control:
        found.append(
            Trouble(
                "bad",
                f"The control plane does not answer (last report {span(silent_s)} ago). Workers and "
                "routers go on; the replicas are shown as of then.",
            )
        )
    if state is not None and not control:
        found += _replicas(state.replicas)
        found += _experts(state.experts)
        if not state.routers:
            found.append(Trouble("bad", "No router follows this cluster: no request can arrive."))
        found += [
            Trouble("bad", f"Node {n.host or n.node[:12]} is lost.") for n in state.nodes if not n.is_alive
        ]
    if parked := round(level(now, c.PARKED.name) or 0.0):
        text = f"{plural(parked, 'worker')} parked: no expert rank has what the sequences there need."
        found.append(Trouble("bad", text))
    if level(now, c.DEGRADED.name, pool="prefill"):
        found.append(Trouble("bad", "Degraded: no worker of the prefill pool serves."))
    if level(now, c.DEGRADED.name, pool="decode"):
        found.append(Trouble("bad", "Degraded: no worker of the decode pool serves."))
    if level(now, c.PREDICTOR_FALLBACK.name):
        found.append(Trouble("warn", "Predictions are too far off: placement is by cached prefix."))
    found += [
        Trouble("warn", f"{name} does not answer to scrapes of its metrics.") for name in sorted(unreadable)
    ]
    more = len(found) - SHOWN_MAX
    return found if more <= 0 else [*found[:SHOWN_MAX], Trouble("warn", f"… and {more} more.")]


def _replicas(replicas: Iterable[ReplicaStatus]) -> Iterator[Trouble]:
    for r in replicas:
        age = span(r.for_s)
        match r.state:
            case ReplicaState.SUSPECT:
                yield Trouble("bad", f"{r.name} missed heartbeats for {age}: it gets no new requests.")
            case ReplicaState.WAITING:
                reason = f": {r.last_exit}" if r.last_exit else ""
                yield Trouble("bad", f"{r.name} has had no process for {age}{reason:.160}")
            case ReplicaState.KILLING:
                yield Trouble("bad", f"{r.name} is being killed: {r.reason:.160}")
            case ReplicaState.STARTING if r.deaths_in_a_row or r.last_exit:
                yield Trouble(
                    "warn", f"{r.name} has been restarting for {age}; last exit: {r.last_exit:.160}"
                )
            case _:
                pass


def _experts(groups: Iterable[ExpertGroupState]) -> Iterator[Trouble]:
    for group in groups:
        ready = ready_count(group)
        if group.missing:
            text = f"No expert rank of {group.group} holds {plural(group.missing, 'expert')}"
            yield Trouble("bad", f"{text:.160}: sequences that need them wait.")
        if ready < group.wanted_ranks:
            yield Trouble(
                "warn", f"{group.group:.160}: {ready} of {group.wanted_ranks} expert ranks are ready."
            )
