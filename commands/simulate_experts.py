"""The options of `baton simulate` for pools whose experts are divided over GPUs, and what follows."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from baton.config import Config
from baton.core.errors import SetupError
from simulator.experts.layout import NODE_GPUS
from simulator.fleet.expert_cluster import NODE_BACK_S

LOADS = "zipf:1.0"

ExpertLoad = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="How tokens use experts, with experts.parallel: uniform, zipf:EXPONENT, or a JSON file of "
        "counts per layer and expert.",
    ),
]
NodeGpus = Annotated[
    int, typer.Option(min=1, help="GPUs of a node that NVLink connects, with experts.parallel.")
]
OncePerNode = Annotated[
    bool,
    typer.Option(
        "--rows-once-per-node",
        help="Rows of prompts cross the network once per node and go on over NVLink, not once per rank.",
    ),
]
LoseNode = Annotated[
    list[str],
    typer.Option(
        metavar="ROLE@SECONDS",
        help="Lose a node of the prefill, decode or aggregated pool at this time, with experts.parallel; "
        "repeatable.",
    ),
]
NodeBack = Annotated[float, typer.Option(min=1, help="Seconds after which a lost node serves again.")]


class ExpertOptions(NamedTuple):
    """The options by the names that `baton simulate` gives them."""

    expert_load: str = LOADS
    node_gpus: int = NODE_GPUS
    once_per_node: bool = False
    lose_node: Sequence[str] = ()
    node_back: float = NODE_BACK_S


def check_expert_options(options: ExpertOptions, config: Config) -> None:
    """Raises SetupError for an option that would have no effect."""
    if config.experts.parallel != "off":
        return
    defaults = ExpertOptions()
    for name, flag in (
        ("expert_load", "--expert-load"),
        ("node_gpus", "--node-gpus"),
        ("once_per_node", "--rows-once-per-node"),
        ("lose_node", "--lose-node"),
    ):
        given, default = getattr(options, name), getattr(defaults, name)
        if given != default and given:
            raise SetupError(f"{flag} needs --set experts.parallel=workers or ranks")
