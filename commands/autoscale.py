"""The options of `baton simulate … --autoscale RULE`, and the scaling of a fleet that follows from them."""

from collections.abc import Callable
from typing import Annotated

import typer

from baton.config import AutoscaleConfig
from baton.core.errors import SetupError
from baton.core.messages import Role
from control_plane.autoscaler.settings import settings_of
from control_plane.autoscaler.values import LatencyObjective
from simulator.fleet.fleet import Fleet
from simulator.fleet.scaling import FleetScaling, ScalingSpec
from simulator.fleet.scaling_rules import RULES, make_rule
from simulator.fleet.spec import FleetSpec

AutoscaleRule = Annotated[
    str,
    typer.Option(
        "--autoscale",
        metavar="RULE",
        help="Rule that starts, switches and drains workers: "
        + ", ".join(RULES)
        + ". Set bounds and the other settings with --set autoscale.FIELD=VALUE.",
    ),
]
START_UP_S, HPA_TARGET = 120.0, 0.7
StartUp = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"Seconds that a new worker needs to start, with --autoscale; default: {START_UP_S:g}.",
    ),
]
HpaTarget = Annotated[
    float | None,
    typer.Option(
        min=0.05, max=1, help=f"Utilisation (0 to 1) that --autoscale hpa aims at; default: {HPA_TARGET}."
    ),
]
Advise = Annotated[bool, typer.Option(help="Only record what --autoscale would do.")]


def check_options(name: str, *, start_up_s: float | None, hpa_target: float | None, is_advice: bool) -> None:
    """Raises SetupError for an option that would have no effect."""
    asked = {
        "--start-up": start_up_s is not None,
        "--advise": is_advice,
        "--hpa-target": hpa_target is not None,
    }
    for option, is_given in asked.items():
        rule = "hpa" if option == "--hpa-target" else "RULE"
        if is_given and (not name or rule not in ("RULE", name)):
            raise SetupError(f"{option} needs --autoscale {rule}")


def scaled(
    name: str,
    spec: FleetSpec,
    config: AutoscaleConfig,
    *,
    start_up_s: float | None,
    hpa_target: float | None,
    is_advice: bool,
    gpus_per_worker: int,
) -> Callable[[Fleet], FleetScaling]:
    """A function that adds the scaling to a fleet that is about to run. Raises SetupError."""
    if name not in RULES:
        raise SetupError(f"--autoscale {name}: no such rule; choose one of {', '.join(RULES)}")
    if spec.cells > 1:
        raise SetupError("--autoscale works with one cell: leave --cells out")
    roles = {kind.role for kind, _ in spec.workers}
    if Role.AGGREGATED in roles and len(roles) > 1:
        raise SetupError("--autoscale works with --prefill and --decode, or with --aggregated alone")
    settings = settings_of(
        config,
        roles=roles,
        objectives={name: LatencyObjective(*slo) for name, slo in spec.slo_classes.items()},
        hold_s=spec.router.queue_wait_s,
        is_advice=is_advice,
        ranks=dict.fromkeys(roles, gpus_per_worker),
    )
    rule = make_rule(name, settings, target=HPA_TARGET if hpa_target is None else hpa_target)
    scaling = ScalingSpec(
        start_s=START_UP_S if start_up_s is None else start_up_s,
        interval_s=config.interval_s,
        gpus_per_worker=gpus_per_worker,
        is_advice=is_advice,
    )

    def make(fleet: Fleet) -> FleetScaling:
        made = FleetScaling(fleet, scaling, rule)
        made.begin()
        return made

    return make
