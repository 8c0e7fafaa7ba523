"""Division of a model over ranks: tensor ranks hold a part of every layer, stages hold whole layers.

Heads, intermediate sizes and the vocabulary are divided over tensor ranks. Key-value heads that are fewer
than ranks are held by several of them. The latent of MLA, routers and norms are on every rank.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.errors import SetupError
from baton.core.shape import Shape
from engine.model_files.spec import ModelSpec, MoeSpec

MXFP4_BLOCK = 32
"""Numbers of an MXFP4 matrix that share a scale."""
_VOCABULARY_UNIT = 64
"""Rows of the embedding are divided in multiples of this where there are enough of them."""

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")

Places = tuple[range, ...]
"""Places along one dimension of a tensor, in the order in which they are wanted."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Places along one dimension that a rank holds."""

    total: int
    """Size of the dimension in the whole model."""
    places: Places


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a matrix that a rank holds; None: all of that dimension. At most one of the two is divided."""

    rows: Shard | None = None
    """Outputs. One-dimensional tensors have rows only."""
    columns: Shard | None = None
    """Inputs: the products of all ranks must be added up. `places` is one range."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Place of a pipeline stage in the model."""

    first_layer: int
    is_first: bool
    """It embeds the tokens."""
    is_last: bool
    """It has the last norm and the head."""


ONLY_STAGE = StagePlace(0, is_first=True, is_last=True)


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's part of a model that `check_division` has let pass."""

    spec: ModelSpec
    """The whole model."""
    tensor: int = 1
    rank: int = 0
    """Tensor rank, 0 … tensor - 1."""
    layers: range | None = None
    """Layers of the rank's stage; None: all."""

    @property
    def adds_biases(self) -> bool:
        """True for the one rank that adds the biases of matrices whose products are summed."""
        return self.rank == 0

    @property
    def stage(self) -> StagePlace:
        layers, count = self.layers or range(self.spec.layer_count), self.spec.layer_count
        return StagePlace(layers.start, is_first=layers.start == 0, is_last=layers.stop == count)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the model."""
        return self.tensor == 1 and self.stage == ONLY_STAGE

    @property
    def vocabulary(self) -> tuple[range, ...]:
        """Rows of the embedding and of the head that each tensor rank holds."""
        return tuple(_vocabulary(self.spec, self.tensor, rank) for rank in range(self.tensor))

    def is_elsewhere(self, module: str) -> bool:
        """Whether a module belongs to a layer of another stage. That stage knows whether it exists."""
        found = _LAYER.search(module)
        if found is None or self.layers is None:
            return False
        layer = int(found[1])
        return layer < self.spec.layer_count and layer not in self.layers

    def rank_spec(self) -> ModelSpec:
        """The model as the forward pass of this rank sees it."""
        spec, rank = self.spec, self.rank
        layers = self.layers or range(spec.layer_count)
        moe = None if spec.moe is None else self._rank_moe(spec.moe, layers)
        has_mlps = spec.moe is None or len(spec.moe.layers) < spec.layer_count
        return replace(
            spec,
            vocab_size=len(_vocabulary(spec, self.tensor, rank)),
            intermediate_size=len(_even(spec.intermediate_size, self.tensor, rank)) if has_mlps else 0,
            layer_count=len(layers),
            head_count=spec.head_count // self.tensor,
            # MLA has one latent for all heads.
            kv_head_count=spec.kv_head_count if spec.mla is not None else len(self.kv_heads()),
            windows=spec.windows[layers.start : layers.stop],
            layer_ropes=spec.layer_ropes[layers.start : layers.stop],
            moe=moe,
        )

    def cut(self, module: str) -> Cut:
        """Part of a module's matrix, or of a tensor that is no matrix, by its name in the checkpoint."""
        spec = self.spec
        key_dim = spec.head_dim if spec.mla is None else spec.mla.head_dim
        value_dim = spec.head_dim if spec.mla is None else spec.mla.value_dim
        match module.rpartition(".")[2]:
            case "q_proj" | "q_b_proj":
                return Cut(rows=self._heads(key_dim))
            case "k_proj" | "v_proj":
                return Cut(rows=self._keys())
            case "qkv_proj":
                return Cut(rows=_behind_one_another(self._heads(key_dim), self._keys(), self._keys()))
            case "kv_b_proj":
                assert spec.mla is not None
                return Cut(rows=self._heads(spec.mla.nope_dim + value_dim))
            case "o_proj":
                return Cut(columns=self._heads(value_dim))
            case "sinks":
                return Cut(rows=self._heads(1))
            case "gate_proj" | "up_proj" | "w1" | "w3":
                return Cut(rows=self._inner(module))
            case "gate_up_proj":
                inner = self._inner(module)
                return Cut(rows=_behind_one_another(inner, inner))
            case "down_proj" | "w2":
                return Cut(columns=self._inner(module))
            case "embed_tokens" | "lm_head":
                return Cut(rows=Shard(spec.vocab_size, (_vocabulary(spec, self.tensor, self.rank),)))
            case _:
                return Cut()

    def _rank_moe(self, moe: MoeSpec, layers: range) -> MoeSpec:
        return replace(
            moe,
            layers=tuple(layer - layers.start for layer in moe.layers if layer in layers),
            intermediate_size=len(_expert_inner(moe, self.tensor, self.rank)),
            shared_intermediate_size=len(_even(moe.shared_intermediate_size, self.tensor, self.rank)),
        )

    def kv_heads(self) -> range:
        """Key-value heads of the whole model that the rank holds; of MLA, the one latent."""
        if self.spec.mla is not None:
            return range(1)
        count = self.spec.kv_head_count
        if count >= self.tensor:
            return _even(count, self.tensor, self.rank)
        first = self.rank * count // self.tensor
        return range(first, first + 1)

    def _heads(self, dim: int) -> Shard:
        heads = _even(self.spec.head_count, self.tensor, self.rank)
        return Shard(self.spec.head_count * dim, (range(heads.start * dim, heads.stop * dim),))

    def _keys(self) -> Shard:
        heads, dim = self.kv_heads(), self.spec.head_dim
        return Shard(self.spec.kv_head_count * dim, (range(heads.start * dim, heads.stop * dim),))

    def _inner(self, module: str) -> Shard:
        moe = self.spec.moe
        if moe is not None and ".experts." in module:
            return Shard(moe.intermediate_size, (_expert_inner(moe, self.tensor, self.rank),))
        if moe is not None and ".shared_expert" in module:
            total = moe.shared_intermediate_size
        else:
            total = self.spec.intermediate_size
        return Shard(total, (_even(total, self.tensor, self.rank),))


def rank_divisions(spec: ModelSpec, shape: Shape) -> tuple[Division, ...]:
    """The parts of all ranks, by rank. Raises SetupError, see `check_division`."""
    check_division(spec, tensor=shape.tensor, pipeline=shape.pipeline, context=shape.context)
    stages = divide_layers(_layer_costs(spec), shape.pipeline, last_cost=_head_cost(spec))
    places = (shape.position(rank) for rank in range(shape.rank_count))
    return tuple(Division(spec, shape.tensor, place.tensor_rank, stages[place.stage]) for place in places)


def _layer_costs(spec: ModelSpec) -> list[float]:
    """Weights that one token meets in each layer: what a decode step reads, and what a prompt multiplies."""
    moe = spec.moe
    q, kv = spec.head_count * spec.head_dim, spec.kv_head_count * spec.head_dim
    attention = spec.hidden_size * (2 * q + 2 * kv)
    dense = 3 * spec.hidden_size * spec.intermediate_size
    if moe is None:
        return [float(attention + dense)] * spec.layer_count
    inner = moe.experts_per_token * moe.intermediate_size + moe.shared_intermediate_size
    sparse = 3 * spec.hidden_size * inner
    return [
        float(attention + (sparse if layer in moe.layers else dense)) for layer in range(spec.layer_count)
    ]


def pair_cost(spec: ModelSpec) -> float:
    """Products that a token costs for each position before it, beside those that it costs anyway."""
    return 2 * spec.layer_count * spec.head_count * spec.head_dim / sum(_layer_costs(spec))


def _head_cost(spec: ModelSpec) -> float:
    """Weights of the head. Prompts multiply it for one row only, so it counts by half."""
    return 0.5 * spec.vocab_size * spec.hidden_size


def check_division(spec: ModelSpec, *, tensor: int = 1, pipeline: int = 1, context: int = 1) -> None:
    """Raises SetupError with the number that does not divide, and the sizes that would do."""
    if pipeline > spec.layer_count:
        raise SetupError(
            f"pp{pipeline} has more stages than the model has layers: at most pp{spec.layer_count} is "
            "possible"
        )
    if not spec.is_native and max(tensor, pipeline, context) > 1:
        raise SetupError(
            f"{Shape(tensor, pipeline, context)}: {spec.architecture} runs through transformers' modules, "
            "whose work cannot be divided; one rank is possible"
        )
    problem = next(_problems(spec, tensor), None)
    if problem is not None:
        raise SetupError(f"tp{tensor} is not possible: {problem}; possible are {_possible(spec)}")


def divide_layers(
    costs: Sequence[float], stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> tuple[range, ...]:
    """Layers of each pipeline stage, such that the costliest stage is as cheap as possible, and the others as
    equal as that allows.

    costs: of each layer, in any unit. first_cost: what the first stage has beside its layers (the embedding).
    last_cost: what the last has (the head).
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise SetupError(f"pp{stages} is not possible: the model has {count} layers")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        extra = (first_cost if stage == 0 else 0.0) + (last_cost if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    # best[stop]: (costliest, sum of squares, starts) of the stages so far, which end before layer `stop`.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        left = stages - stage - 1
        ends = [count] if not left else range(stage + 1, count - left + 1)
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in ends:
            following[stop] = min(
                (max(costliest, cost), squares + cost * cost, (*starts, start))
                for start, (costliest, squares, starts) in best.items()
                if start < stop
                for cost in [cost_of(stage, start, stop)]
            )
        best = following
    starts = best[count][2]
    return tuple(range(start, stop) for start, stop in zip(starts, (*starts[1:], count), strict=True))


def _problems(spec: ModelSpec, tensor: int) -> Iterator[str]:
    kv = spec.kv_head_count
    if tensor < 1:
        yield "it must be at least 1"
        return
    if spec.head_count % tensor:
        yield f"{spec.head_count} attention heads do not divide by {tensor}"
    if spec.mla is None and kv % tensor and tensor % kv:
        yield f"{kv} key-value heads neither divide by {tensor} nor divide it"
    for what, total, in_blocks in _inner_sizes(spec):
        if in_blocks and -(-total // MXFP4_BLOCK) < tensor:
            yield f"the {what} size {total} has fewer than {tensor} MXFP4 blocks of {MXFP4_BLOCK}"
        elif not in_blocks and total % tensor:
            yield f"the {what} size {total} does not divide by {tensor}"
    if spec.vocab_size < tensor:
        yield f"the vocabulary of {spec.vocab_size} is smaller"
    yield from _split_groups(spec, tensor)


def _inner_sizes(spec: ModelSpec) -> Iterator[tuple[str, int, bool]]:
    """(name, size, True if it is divided in MXFP4 blocks) of each kind of MLP that the model has."""
    moe = spec.moe
    if moe is None or len(moe.layers) < spec.layer_count:
        yield "intermediate", spec.intermediate_size, False
    if moe is not None and moe.layers:
        yield "experts' intermediate", moe.intermediate_size, moe.is_mxfp4
    if moe is not None and moe.shared_intermediate_size:
        yield "shared expert's intermediate", moe.shared_intermediate_size, False


def _split_groups(spec: ModelSpec, tensor: int) -> Iterator[str]:
    """Groups of a quantised checkpoint stay whole: they share a scale."""
    scheme = spec.quantization
    if scheme is None or tensor == 1:
        return
    group = scheme.fp8_block or scheme.group_size
    if not group:
        return
    value_dim = spec.head_dim if spec.mla is None else spec.mla.value_dim
    sizes = [("attention output's", spec.head_count * value_dim)]
    sizes += [(f"{what} size's", total) for what, total, in_blocks in _inner_sizes(spec) if not in_blocks]
    for what, total in sizes:
        if total % (group * tensor):
            yield (
                f"the {what} {total} inputs are {-(-total // group)} groups of {group} ({scheme.label}), "
                f"which do not divide by {tensor}"
            )


def _possible(spec: ModelSpec) -> str:
    sizes = [n for n in range(1, spec.head_count + 1) if next(_problems(spec, n), None) is None]
    return ", ".join(f"tp{n}" for n in sizes) or "none"


def _even(total: int, parts: int, index: int) -> range:
    assert total % parts == 0, (total, parts)
    size = total // parts
    return range(index * size, (index + 1) * size)


def _in_units(total: int, unit: int, parts: int, index: int) -> range:
    """Part `index` of `total` in whole units, the first parts having one more; the last unit may be short."""
    each, more = divmod(-(-total // unit), parts)
    start = index * each + min(index, more)
    stop = start + each + (index < more)
    return range(min(total, start * unit), min(total, stop * unit))


def _expert_inner(moe: MoeSpec, tensor: int, rank: int) -> range:
    if moe.is_mxfp4:
        # gpt-oss has 90 blocks, which 4 or 8 ranks cannot divide evenly.
        return _in_units(moe.intermediate_size, MXFP4_BLOCK, tensor, rank)
    return _even(moe.intermediate_size, tensor, rank)


def _vocabulary(spec: ModelSpec, tensor: int, rank: int) -> range:
    unit = _VOCABULARY_UNIT if spec.vocab_size >= _VOCABULARY_UNIT * tensor else 1
    return _in_units(spec.vocab_size, unit, tensor, rank)


def _behind_one_another(*shards: Shard) -> Shard:
    """The shard of a tensor in which several tensors follow one another, of their shards."""
    places: list[range] = []
    first = 0
    for shard in shards:
        places += [range(first + one.start, first + one.stop) for one in shard.places]
        first += shard.total
    return Shard(first, tuple(places))
