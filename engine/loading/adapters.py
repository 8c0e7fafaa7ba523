"""LoRA adapters of one engine: read in any thread, put into slots between steps."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import SetupError
from baton.core.messages import AdapterRef
from engine.loading.parts import take
from engine.model_files.adapter_files import (
    LoraModule,
    check_values,
    digest_adapter,
    read_adapter,
    resolve_adapter,
)
from engine.model_files.division import Division
from engine.model_files.safetensors_files import TensorEntry
from engine.models.linear import Linear
from engine.models.lora import LowRank, LowRankPart, join_parts

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    key: str
    """`AdapterRef.key`"""
    low_ranks: tuple[LowRank | None, ...]
    """One per matrix of the model."""


class AdapterSlots:
    """The adapters that steps can use. All methods but `read` belong to the engine's thread."""

    def __init__(
        self,
        linears: Sequence[Linear[Any]],
        division: Division,
        *,
        slot_count: int,
        rank_max: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._linears, self._division = tuple(linears), division
        self._rank_max = rank_max
        self._dtype, self._device = dtype, device
        self._free = list(range(slot_count))
        self._slots: dict[str, int] = {}

    @property
    def keys(self) -> Collection[str]:
        return self._slots.keys()

    def slot(self, key: str) -> int:
        """Slot of an installed adapter; -1 for the empty key, which is the base model."""
        return self._slots[key] if key else -1

    def read(self, ref: AdapterRef) -> AdapterWeights:
        """Read an adapter's files into what `install` takes. It takes a while and may run in any thread.

        Raises SetupError if the adapter cannot be found, is damaged, is not supported, belongs to another
        model, has numbers that are not finite, or if its files are not those that `ref.digest` names.
        """
        folder = resolve_adapter(ref.path)
        files = read_adapter(folder, rank_max=self._rank_max)
        if ref.digest and digest_adapter(folder) != ref.digest:
            raise SetupError(f"adapter {ref.name}: the files in {folder} have changed; register it anew")
        self._check_targets(files.modules, folder)
        check_values(files)
        by_name = {module.name: module for module in files.modules}
        return AdapterWeights(
            ref.key, tuple(self._low_rank(linear, by_name, folder) for linear in self._linears)
        )

    def install(self, adapter: AdapterWeights) -> None:
        """There must be a free slot. Safe to do twice."""
        if adapter.key in self._slots:
            return
        assert self._free, "all adapter slots are taken"
        slot = self._free.pop()
        self._slots[adapter.key] = slot
        try:
            for linear, low_rank in zip(self._linears, adapter.low_ranks, strict=True):
                linear.set_low_rank(slot, low_rank)
        except BaseException:  # a lack of memory: half an adapter must not stay
            self.drop(adapter.key)
            raise

    def drop(self, key: str) -> None:
        """No step uses it any more. Unknown: nothing happens."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._free.append(slot)
        for linear in self._linears:
            linear.set_low_rank(slot, None)

    def _check_targets(self, modules: Sequence[LoraModule], folder: Path) -> None:
        known = {part.name for linear in self._linears for part in linear.parts}
        strangers = [
            module.name
            for module in modules
            if module.name not in known and not self._division.is_elsewhere(module.name)
        ]
        if strangers:
            raise SetupError(
                f"adapter {folder} changes {strangers[0]}, which this model does not have or cannot adapt; "
                "supported are the projections of attention and of dense MLPs"
            )

    def _low_rank(self, linear: Linear[Any], modules: dict[str, LoraModule], folder: Path) -> LowRank | None:
        parts: list[LowRankPart] = []
        first_row = 0
        for part in linear.parts:
            module = modules.get(part.name)
            if module is not None:
                # The rank's rows of B where outputs are divided, its columns of A where inputs are.
                cut = self._division.cut(part.name)
                out_size = part.row_count if cut.rows is None else cut.rows.total
                in_size = linear.in_size if cut.columns is None else cut.columns.total
                _check_shape(module, out_size, in_size, folder)
                a = take(_read(module.a), (None, cut.columns and cut.columns.places))
                b = take(_read(module.b), (cut.rows and cut.rows.places,))
                parts.append(LowRankPart(a, b, module.scale, first_row))
            first_row += part.row_count
        if not parts:
            return None
        joined = join_parts(
            parts, out_size=first_row, in_size=linear.in_size, dtype=self._dtype, device=self._device
        )
        if not bool(joined.a.isfinite().all() & joined.b.isfinite().all()):
            names = ", ".join(part.name for part in linear.parts if part.name in modules)
            raise SetupError(f"adapter {folder}: weights times scale of {names} overflow {self._dtype}")
        return joined


def _check_shape(module: LoraModule, out_size: int, in_size: int, folder: Path) -> None:
    found = (module.b.shape[0], module.a.shape[1])
    if found != (out_size, in_size):
        raise SetupError(
            f"adapter {folder} is for another model: {module.name} is {list(found)} there, "
            f"{[out_size, in_size]} here"
        )


def _read(entry: TensorEntry) -> Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise SetupError(f"{entry.file}: {entry.dtype} is not supported; supported are {', '.join(_DTYPES)}")
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            content = bytearray(stream.read(entry.end - entry.start))
    except OSError as error:
        raise SetupError(f"cannot read {entry.file}: {error}") from error
    if len(content) < entry.end - entry.start:
        raise SetupError(f"{entry.file} became shorter while it was read; load the adapter anew")
    return torch.frombuffer(content, dtype=dtype).view(entry.shape)
