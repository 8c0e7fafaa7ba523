"""One run of the forward pass, taken down so that it can be made again without the Python of the layers.

Calls of native kernels go on a tape (`engine.native.recording`). Torch's operations are seen by a dispatch
mode: those that only look at memory differently need nothing, new memory comes from buffers that stay, a few
are computed by the library and so are on the tape, and any other is called again by the replay, between two
stretches of the tape. What cannot be made again, because its result decides what is computed, is refused.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.step_buffers import LargestStepBuffers, StepBuffers
from engine.kernels.native_glue import Glue
from engine.native.library import library
from engine.native.recording import NativeFunction, NotRecordable, Replay, Tape
from engine.native.sized_replay import SizedReplay

_aten: Any = torch.ops.aten


def _of_size(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> "_Fresh":
    return tuple(size), dtype or torch.get_default_dtype()


def _of_size_like(x: Tensor, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> "_Fresh":
    return tuple(size), dtype or x.dtype


def _like(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> "_Fresh":
    return tuple(x.shape), dtype or x.dtype


_Fresh = tuple[tuple[int, ...], torch.dtype]
_FRESH: dict[Any, Callable[..., _Fresh]] = {
    _aten.empty.memory_format: _of_size,
    _aten.new_empty.default: _of_size_like,
    _aten.empty_like.default: _like,
}
"""Operations that only give memory, and what of it they give."""
_UNCERTAIN = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
)


class TorchCall:
    """One of torch's operations, made again with the same memory."""

    def __init__(
        self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], out: Any, *, is_effect: bool
    ) -> None:
        """is_effect: it changes something that outlives the step, such as a count."""
        self._function, self._arguments, self._named = function, arguments, named
        self._out = [] if is_effect or function._schema.is_mutable else list(_tensors(out))
        self.is_effect = is_effect

    def __call__(self) -> None:
        result = self._function(*self._arguments, **self._named)
        for kept, new in zip(self._out, _tensors(result) if self._out else (), strict=True):
            kept.copy_(new)


class StepTrace:
    """A forward pass as it is made again."""

    def __init__(self, parts: Sequence[Replay | TorchCall], result: Tensor, torch_bytes: int) -> None:
        """result: where every replay leaves it. torch_bytes: memory that is in no buffer."""
        self._parts = tuple(parts)
        self.result, self.torch_bytes = result, torch_bytes
        self.native_calls = sum(len(part) for part in parts if isinstance(part, Replay))
        self.torch_calls = sum(isinstance(part, TorchCall) for part in parts)
        self.memory_bytes = torch_bytes + sum(part.memory_bytes for part in parts if isinstance(part, Replay))

    def replay(self, *, with_effects: bool = True) -> None:
        """Raises NotRecordable: a kernel failed."""
        if not self.torch_calls:
            for part in self._parts:
                part()
            return
        with torch.inference_mode():
            for part in self._parts:
                if with_effects or not (isinstance(part, TorchCall) and part.is_effect):
                    part()


class SizedTrace:
    """A forward pass as it is made again for any size up to the largest."""

    def __init__(self, replay: SizedReplay, result: Tensor, buffers: LargestStepBuffers) -> None:
        """result: of the largest size. buffers: memory that the calls name; it lives as long as they may be
        made."""
        self._replay, self._buffers, self.result = replay, buffers, result

    def __len__(self) -> int:
        return len(self._replay)

    @property
    def memory_bytes(self) -> int:
        return self._replay.memory_bytes + self._buffers.memory_bytes

    def replay(self, *sizes: int) -> None:
        """Raises NotRecordable: a kernel failed."""
        self._replay(*sizes)


class TraceOfRows:
    """A forward pass whose only size is its number of rows, for one number of them. It is used as a
    `StepTrace` is."""

    torch_calls = 0

    def __init__(self, trace: SizedTrace, rows: int) -> None:
        self._trace, self._rows, self.result = trace, rows, trace.result[:rows]

    @property
    def native_calls(self) -> int:
        return len(self._trace)

    @property
    def memory_bytes(self) -> int:
        """The memory that all numbers of rows share."""
        return self._trace.memory_bytes

    def replay(self, *, with_effects: bool = True) -> None:
        """Nothing here has effects. Raises NotRecordable: a kernel failed."""
        del with_effects
        self._trace.replay(self._rows)


def trace(compute: Callable[[], Tensor], buffers: StepBuffers) -> StepTrace:
    """Run `compute`, which is a function of memory that stays where it is, and take it down. Effects on what
    outlives the step are taken down and not made. Raises NotRecordable."""
    tape = Tape()
    mode = _Mode(tape, buffers)
    with _open(tape), mode:
        result = compute()
    return StepTrace(mode.finished(), result, mode.torch_bytes)


def trace_sizes(
    compute: Callable[..., Tensor], sizes: Sequence[tuple[int, ...]], buffers: LargestStepBuffers
) -> SizedTrace:
    """Take down `compute(*sizes)` for some sizes, the largest first; which others, see `SizedReplay`. Nothing
    is computed. Raises NotRecordable; also for operations that only torch has."""

    def take_down(of: tuple[int, ...]) -> tuple[Tape, Tensor]:
        tape = Tape(is_dry=True)
        buffers.begin()
        with _open(tape), _Mode(tape, buffers):
            return tape, compute(*of)

    replay = SizedReplay(library(), [take_down(of)[0] for of in sizes], sizes)
    return SizedTrace(replay, take_down(sizes[0])[1], buffers)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal to the last bit."""
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


@contextmanager
def _open(tape: Tape) -> Generator[None]:
    if NativeFunction.tape is not None:
        raise NotRecordable("another thread records")
    collects = gc.isenabled()
    gc.disable()  # finalisers run on any thread, and what they call is none of the step's
    NativeFunction.tape = tape
    try:
        yield
    finally:
        NativeFunction.tape = None
        if collects:
            gc.enable()


class _Mode(TorchDispatchMode):
    def __init__(self, tape: Tape, buffers: StepBuffers) -> None:
        super().__init__()
        self._tape, self._buffers = tape, buffers
        self._glue = Glue(buffers.empty)
        self._parts: list[Replay | TorchCall] = []
        self._own: dict[int, Any] = {}
        """Storages that torch made for results, by address."""
        self.torch_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps this mode for its compiler. The wrapper imports the compiler, sympy and triton:
        100 MB of a worker, and seconds of its start, for a compiler that nothing here calls."""
        return False

    def finished(self) -> list[Replay | TorchCall]:
        self._cut()
        return self._parts

    def _cut(self) -> None:
        stretch = self._tape.cut(library())
        if stretch is not None:
            self._parts.append(stretch)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        if func in _FRESH:
            size, dtype = _FRESH[func](*args, **named)
            return self._buffers.empty(size, dtype)
        if self._tape.is_dry:
            return self._without_torch(func, args, named)
        if func._schema.is_mutable:
            return self._mutate(func, args, named)
        known = self._glue.compute(func, args, named)
        if known is not None:
            return known
        if any(tag in func.tags for tag in _UNCERTAIN) and not _keeps_shape(func, args):
            raise NotRecordable(f"{func} depends on numbers")
        out = func(*args, **named)
        found = list(_tensors(out))
        if not found:
            raise NotRecordable(f"{func} gives numbers to Python")
        inputs = {_place(tensor) for tensor in _tensors((args, named))}
        if all(_place(tensor) in inputs for tensor in found):
            return out
        self._note(func, args, named, out, is_effect=False)
        for tensor in found:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._own[storage.data_ptr()] = storage
                self.torch_bytes += storage.nbytes()
        return out

    def _without_torch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        known = self._glue.compute(func, args, named)
        if known is not None:
            return known
        if func._schema.is_mutable:
            raise NotRecordable(f"{func} is torch's")
        out = func(*args, **named)
        inputs = {_place(tensor) for tensor in _tensors((args, named))}
        found = [_place(tensor) for tensor in _tensors(out)]
        if not found or not inputs.issuperset(found):
            raise NotRecordable(f"{func} is torch's")
        return out

    def _mutate(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The operation changes its first argument. Only what was made in the step is changed now."""
        changed: Tensor = args[0]
        is_own = _place(changed) in self._own or self._buffers.has(_place(changed))
        self._note(func, args, named, None, is_effect=not is_own)
        return func(*args, **named) if is_own else changed

    def _note(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any, *, is_effect: bool
    ) -> None:
        self._cut()
        self._parts.append(TorchCall(func, args, named, out, is_effect=is_effect))


def _keeps_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Indexing by whole numbers gives as many rows as there are indices; by a mask it does not."""
    return func is _aten.index.Tensor and all(
        index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]
    )


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
