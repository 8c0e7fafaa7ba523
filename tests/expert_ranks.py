"""Expert ranks in this process, for tests: real ranks and links, with maps that the test announces."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.experts import ExpertMapRank, ExpertMapUpdate, ExpertRankRef
from baton.core.ids import ExpertRankId
from engine.experts.caller import ExpertCaller, ExpertReport
from engine.experts.rank import ExpertRankEngine
from engine.experts.routed import RemoteExperts
from engine.model_files.division import Division


class LocalExperts:
    """Ranks by name. `announce` tells every caller a map of what each rank shall hold."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("a", "b"),
        *,
        config: ExpertsConfig | None = None,
        kernels: str = "native",
        is_far: bool = False,
        model: ModelConfig | None = None,
    ) -> None:
        """is_far: callers reach the ranks over TCP only."""
        self.config = config or ExpertsConfig()
        self.model = model or ModelConfig(path=str(folder))
        self.engine = EngineConfig(kernels=kernels, threads=1, block_tokens=16)
        self.ranks: dict[str, ExpertRankEngine] = {}
        self.refs: dict[str, ExpertRankRef] = {}
        self.callers: list[ExpertCaller] = []
        self.reports: list[ExpertReport] = []
        self.map: dict[str, tuple[int, ...]] = {}
        self.epoch, self._is_far = 0, is_far
        for name in names:
            self.add(name)

    def add(self, name: str) -> ExpertRankEngine:
        rank = self.ranks[name] = ExpertRankEngine.load(self.model, self.engine, self.config, slots=64)
        ref = rank.start(host="127.0.0.1", rank_id=ExpertRankId(name))
        if self._is_far:
            ref = ExpertRankRef(ref.rank_id, "elsewhere", ref.socket, ref.address, ref.secret)
        self.refs[name] = ref
        return rank

    @property
    def shape(self) -> tuple[int, int]:
        rank = next(iter(self.ranks.values()))
        return rank.layer_count, rank.expert_count

    def everything(self) -> tuple[int, ...]:
        layers, experts = self.shape
        return tuple(range(layers * experts))

    def divide(self, names: Sequence[str] | None = None) -> None:
        """Every rank holds its part of every layer, by turns."""
        names = names or list(self.ranks)
        self.announce({name: self.everything()[number :: len(names)] for number, name in enumerate(names)})

    def announce(self, held: Mapping[str, Sequence[int]]) -> None:
        """Have each rank load what it shall hold, then tell callers, then drop what is not named."""
        self.map = {name: tuple(experts) for name, experts in held.items()}
        for name, experts in self.map.items():
            for expert in experts:
                self.ranks[name].load_expert(expert)
        self.tell()
        for name, rank in self.ranks.items():
            for expert in set(rank.held) - set(self.map.get(name, ())):
                rank.drop_expert(expert)

    def tell(self) -> None:
        """Announce the map as it stands, with a new epoch."""
        self.epoch += 1
        for caller in self.callers:
            caller.use(self.update())

    def update(self) -> ExpertMapUpdate:
        layers, experts = self.shape
        ranks = tuple(ExpertMapRank(self.refs[name], held) for name, held in self.map.items())
        return ExpertMapUpdate(self.epoch, layers, experts, ranks)

    def caller(self, hidden: int, dtype: torch.dtype) -> ExpertCaller:
        layers, experts = self.shape
        made = ExpertCaller(
            self.config,
            layer_count=layers,
            expert_count=experts,
            hidden=hidden,
            dtype=dtype,
            name=f"caller-{len(self.callers)}",
            report=self.reports.append,
        )
        self.callers.append(made)
        made.use(self.update())
        assert made.wait_complete(10.0)
        return made

    def routed(self, division: Division, dtype: torch.dtype) -> RemoteExperts:
        """See `RoutedFactory`."""
        return RemoteExperts.of(self.caller(division.spec.hidden_size, dtype), division)

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        for rank in self.ranks.values():
            rank.close()


@contextlib.contextmanager
def local_experts(
    folder: Path, names: Sequence[str] = ("a", "b"), **options: object
) -> Iterator[LocalExperts]:
    experts = LocalExperts(folder, names, **options)
    try:
        experts.divide()
        yield experts
    finally:
        experts.close()
