"""How unevenly tokens use experts, and what is left of it where the production placement puts them."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError
from baton.core.ids import ExpertRankId, NodeId
from control_plane.experts.place import ExpertPlacement, balance_of, place
from control_plane.experts.values import EMPTY, ExpertRank, Loads, Slots
from simulator.experts.layout import ExpertLayout
from simulator.models import ModelShape

COUNTED_TOKENS = 2**20
"""Tokens whose counts the placement goes by."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Unevenness:
    """How much more than the mean the busiest has to do; 1: all have the same."""

    rank: float
    """The busiest rank's load over the mean, averaged over layers."""
    node: float


EVEN = Unevenness(1.0, 1.0)


class ExpertPopularity:
    """The shares of a layer's rows that its experts get, as [L, E] with rows that sum to 1."""

    def __init__(self, shares: Loads, name: str) -> None:
        self.shares, self.name = shares, name

    @staticmethod
    def parse(text: str, model: ModelShape) -> "ExpertPopularity":
        """Read "uniform", "zipf:EXPONENT", or the path of a JSON file with counts per layer and expert, as
        [[…], …]. A file with fewer layers than the model is repeated. Raises SetupError."""
        if text == "uniform":
            return ExpertPopularity.zipf(model, 0.0, name=text)
        if text.startswith("zipf:"):
            return ExpertPopularity.zipf(model, _exponent(text), name=text)
        counts = _read_counts(Path(text))
        if counts.shape[1] != model.experts:
            raise SetupError(
                f"{text} counts {counts.shape[1]} experts; layers of {model.name} have {model.experts}"
            )
        repeats = -(-model.expert_layers // len(counts))
        return ExpertPopularity(_shares(np.tile(counts, (repeats, 1))[: model.expert_layers]), text)

    @staticmethod
    def zipf(model: ModelShape, exponent: float, *, name: str) -> "ExpertPopularity":
        """Give the expert of rank k in a layer k^-exponent of its rows, in an order that is drawn. No expert
        gets more than one row of a token."""
        random = np.random.default_rng(SEED)
        weights = np.arange(1, model.experts + 1, dtype=np.float64) ** -exponent
        shares = _capped(weights / weights.sum(), 1 / model.experts_used)
        drawn = [shares[random.permutation(model.experts)] for _ in range(model.expert_layers)]
        return ExpertPopularity(np.stack(drawn), name)

    def counts(self, rows: float) -> Loads:
        """Draw the counts of so many rows per layer."""
        random = np.random.default_rng(SEED + 1)
        return random.poisson(self.shares * rows).astype(np.float64)

    def place(self, model: ModelShape, ranks: list[ExpertRank]) -> ExpertPlacement:
        """Place the experts by the production rules. Raises ExpertsDoNotFit."""
        loads = self.counts(COUNTED_TOKENS * model.experts_used)
        return place(loads, ranks, group_count=model.groups)

    def unevenness(self, placement: ExpertPlacement, *, rows: float, node_gpus: int) -> Unevenness:
        """Compare ranks, and nodes, in a step of so many rows per layer. Its counts are drawn, so that a
        small step is less even than the long run that the placement went by."""
        counts, slots = self.counts(rows), placement.map.slots
        of_ranks = float(np.mean(1 / balance_of(counts, slots)))
        loads = _rank_loads(counts, slots)
        nodes = -(-loads.shape[1] // node_gpus)
        padded = np.pad(loads, ((0, 0), (0, nodes * node_gpus - loads.shape[1])))
        of_nodes = padded.reshape(len(loads), nodes, node_gpus).sum(axis=2)
        means = np.maximum(of_nodes.mean(axis=1), 1e-9)
        return Unevenness(of_ranks, float(np.mean(of_nodes.max(axis=1) / means)))


def expert_ranks(layout: ExpertLayout) -> list[ExpertRank]:
    """Name the ranks of a layout, in the order of their nodes."""
    return [
        ExpertRank(
            ExpertRankId(f"rank-{number:04}"), NodeId(f"node-{number // layout.node_gpus:03}"), layout.slots
        )
        for number in range(layout.ranks)
    ]


def _rank_loads(counts: Loads, slots: Slots) -> Loads:
    """Return the load of every rank as [L, R], with each expert's load divided among its replicas."""
    layers = np.arange(len(counts))[:, None, None]
    replicas = np.zeros((len(counts), counts.shape[1] + 1))
    np.add.at(replicas, (layers, slots), 1)
    sizes = np.zeros(replicas.shape)
    sizes[:, :EMPTY] = counts / np.maximum(replicas[:, :EMPTY], 1)
    return sizes[layers, slots].sum(axis=2)


def _capped(shares: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.float64]:
    """Return the shares with what is above `most` given to the others in proportion."""
    capped = np.zeros(len(shares), dtype=bool)
    found = shares.copy()
    while (above := (found > most * (1 + 1e-12)) & ~capped).any():
        capped |= above
        found[capped] = most
        rest = 1 - most * capped.sum()
        found[~capped] = shares[~capped] * rest / shares[~capped].sum()
    return found


def _exponent(text: str) -> float:
    try:
        exponent = float(text.removeprefix("zipf:"))
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 4:
        raise SetupError(f"{text!r}: write zipf: and an exponent from 0 to 4, such as zipf:1.0")
    return exponent


def _read_counts(path: Path) -> Loads:
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[list[float]])
    except OSError as error:
        raise SetupError(
            f"cannot read counts of experts: {error}; write uniform, zipf:EXPONENT or a file"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} is no list of counts per layer and expert: {error}") from None
    if not listed or len({len(row) for row in listed}) != 1 or min(map(min, listed)) < 0:
        raise SetupError(f"{path} must hold as many counts, 0 or more, for every layer")
    return np.array(listed)


def _shares(counts: Loads) -> Loads:
    totals = counts.sum(axis=1, keepdims=True)
    if not (totals > 0).all():
        raise SetupError("counts of experts: a layer has no rows at all")
    return cast("Loads", counts / totals)
