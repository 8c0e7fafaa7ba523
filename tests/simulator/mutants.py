"""All mutants, by the area of production that each breaks."""

from tests.simulator import (
    control_mutants,
    expert_mutants,
    rank_mutants,
    router_mutants,
    store_mutants,
    transfer_mutants,
    worker_mutants,
)

MUTANTS = {
    "router": router_mutants.MUTANTS,
    "worker": worker_mutants.MUTANTS,
    "transfer": transfer_mutants.MUTANTS,
    "ranks": rank_mutants.MUTANTS,
    "store": store_mutants.MUTANTS,
    "control plane": control_mutants.CONTROL_MUTANTS,
    "autoscaler": control_mutants.SCALING_MUTANTS,
    "experts": expert_mutants.MUTANTS,
}
ALL_MUTANTS = tuple(mutant for mutants in MUTANTS.values() for mutant in mutants)
