"""The pools of `baton simulate`, written as for `baton serve`. All simulated workers have one shape."""

from baton.core.errors import SetupError
from baton.core.shape import CountedShape, Shape

TENSOR_RANKS = 4
"""GPUs of a worker whose shape nobody named."""


def pools_and_shape(
    counts: dict[str, str], *, tensor: int | None, pipeline: int | None
) -> tuple[dict[str, int], Shape]:
    """Read the number of workers of each role, and the shape of all. `tensor` and `pipeline` are those of
    --tp and --pp, None where they are left out. Raises SetupError."""
    found: dict[str, CountedShape] = {}
    for role, text in counts.items():
        try:
            found[role] = CountedShape.parse(text)
        except SetupError as error:
            raise SetupError(f"--{role} {text}: {error}") from None
    wanted = {role: one for role, one in found.items() if one.count}
    shape = next((one.shape for one in wanted.values() if one.shape is not None), None)
    if shape is None:
        shape = Shape(tensor=tensor or TENSOR_RANKS, pipeline=pipeline or 1)
    else:
        _check(shape, wanted, counts)
        if (tensor or shape.tensor, pipeline or shape.pipeline) != (shape.tensor, shape.pipeline):
            raise SetupError(f"{_given(wanted, counts)} and --tp or --pp differ: leave --tp and --pp out")
    return {role: one.count for role, one in found.items()}, shape


def _check(shape: Shape, wanted: dict[str, CountedShape], counts: dict[str, str]) -> None:
    """Raises SetupError unless all workers can have this shape."""
    if any(one.shape != shape for one in wanted.values()):
        better = " ".join(f"--{role} {one.count}x{shape}" for role, one in wanted.items())
        raise SetupError(
            f"{_given(wanted, counts)}: simulated workers all have one shape; write {better}, for example"
        )
    if shape.context > 1:
        raise SetupError(
            f"{_given(wanted, counts)}: simulated workers have tensor and pipeline ranks only; write a shape "
            "such as tp2 or tp2pp2"
        )


def _given(wanted: dict[str, CountedShape], counts: dict[str, str]) -> str:
    return " ".join(f"--{role} {counts[role]}" for role in wanted)
