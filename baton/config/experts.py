"""Settings of expert parallelism."""

from typing import Annotated, Literal

from pydantic import Field

from baton.config.base import Seconds, Section


class ExpertsConfig(Section):
    parallel: Literal["off", "workers", "ranks"] = "off"
    """Where a model's routed experts are. off: every worker holds all of them. workers: every worker has an
    expert rank beside it, and the ranks of a pool divide the experts. ranks: they are on `ranks` expert ranks
    of their own, apart from the workers. An expert rank is a process of its own."""
    ranks: Annotated[int, Field(ge=0, le=1024)] = 0
    """Expert ranks of each pool, where `parallel` is "ranks"."""
    replicas: Annotated[float, Field(ge=1, le=64)] = 1.0
    """Replicas that experts have on average, which is what ranks keep memory for. 1.25: the busiest quarter
    has a second one. 2: every expert survives the loss of a rank without being loaded again."""
    memory_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Most memory that the experts of one rank may take, as when it takes over those of lost ranks. Experts
    beyond it wait for another rank, and workers that need them are parked. 0: what the machine, or the
    device, has left when the rank starts."""
    copies: Literal["peers", "files"] = "peers"
    """Where a rank takes an expert from that another one has. peers: from the other's memory, within
    `migration_bytes_per_s`, and from the model's files if that fails. files: always from the files."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Compute threads of one expert rank. 0: its fair share of the cores."""
    rows: Literal["exact", "model", "int8"] = "exact"
    """How rows of tokens travel. exact: to the experts in the model's data type, and back in float32, which
    gives the tokens of a worker that holds all experts. model: both ways in the model's data type. int8: to
    the experts as int8 with one scale per row, and back in the model's data type."""
    overlap: bool = True
    """Whether a large batch is computed as two halves in turn, one half's attention while the other's rows
    are with the experts."""
    answer_timeout_s: Annotated[float, Field(gt=0, le=600)] = 0.4
    """A rank that neither answers nor shows a sign of life for this long gets no more rows from the worker
    that waits for it. They go to other replicas in the same step, and the control plane is told."""
    compute_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """The same for a rank that shows signs of life, but does not answer."""
    park_after_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """A worker whose rows no rank can take for this long, as when all ranks of a group are lost at once,
    parks: its sequences keep their KV and go on when ranks are back, and it takes no new ones until then."""
    rebalance_s: Seconds = 30.0
    """Time between two looks at whether other placements of the experts would be better."""
    gain_min: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Least gain in balance (mean load of the ranks over the busiest one's) for which experts migrate."""
    half_life_s: Seconds = 60.0
    """Counts of tokens per expert lose half their weight in this time."""
    migration_bytes_per_s: Annotated[float, Field(gt=0)] = 256 * 2.0**20
    """Most bytes of experts per second that a rank receives, or sends, for a better balance. Experts that no
    rank holds are loaded without a limit."""
