"""LoRA adapters that clients can name as models. Each router has a registry of its own."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.core.errors import AdapterNotFound, ClientError, SetupError
from baton.core.messages import AdapterRef
from engine.model_files.adapter_files import (
    AdapterFiles,
    check_values,
    digest_adapter,
    read_adapter,
    resolve_adapter,
)
from router.text.model_card import ModelCard

ADAPTERS_MAX = 4096
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,199}")
TARGETS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}
)
READS_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
"""Modules whose input is the hidden state. Its size tells one base model from another."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ServedAdapter(msgspec.Struct, frozen=True):
    ref: AdapterRef
    created: int


class Adapters:
    def __init__(self, base: str, card: ModelCard, *, rank_max: int, may_change: bool = True) -> None:
        """`base` is the name of the model. `may_change` allows requests to load and unload adapters."""
        self._base, self._card, self._rank_max = base, card, rank_max
        self.may_change = may_change
        self.is_taken: Callable[[str, str], bool] = lambda name, by: False
        """A function that says whether a name belongs to anything but an adapter of the given model. The
        owner of all models sets it."""
        self._adapters: dict[str, ServedAdapter] = {}
        self._lock = asyncio.Lock()

    def get(self, name: str) -> ServedAdapter | None:
        return self._adapters.get(name)

    @property
    def names(self) -> Sequence[str]:
        return list(self._adapters)

    async def load_configured(self, specs: Sequence[str]) -> None:
        """Load the configured adapters, each NAME=FOLDER_OR_HUB_ID. Raises SetupError."""
        for spec in specs:
            name, equals, path = spec.partition("=")
            if not equals or not path:
                raise SetupError(f"model.adapters: {spec!r} is not NAME=FOLDER_OR_HUB_ID")
            try:
                await self.load(name, path)
            except ClientError as error:
                raise SetupError(f"model.adapters: {error}") from error

    async def load(self, name: str, path: str, *, in_place: bool = False) -> str:
        """Load an adapter and return a message for the client. Loading the same files under the same name
        again changes nothing.

        Raises ClientError if the name is taken or the adapter does not fit, and AdapterNotFound if there is
        no such folder.
        """
        if not NAME.fullmatch(name) or name == self._base:
            raise ClientError(
                f"lora_name {name!r:.200} cannot name an adapter: use up to 200 letters, digits and _.:/@-, "
                "and not the model's own name",
                param="lora_name",
            )
        if self.is_taken(name, self._base):
            raise ClientError(
                f"lora_name {name!r} is taken by another model or its adapter; choose another name",
                param="lora_name",
            )
        async with self._lock:
            ref = await asyncio.to_thread(self._read, name, path)
            known = self._adapters.get(name)
            if known is not None and known.ref.digest == ref.digest:
                return f"Success: LoRA adapter '{name}' is loaded already."
            if known is not None and not in_place:
                raise ClientError(
                    f"The LoRA adapter '{name}' is loaded with other files; unload it first, or set "
                    "load_inplace",
                    param="lora_name",
                )
            if known is None and len(self._adapters) >= ADAPTERS_MAX:
                raise ClientError(f"{ADAPTERS_MAX} adapters are loaded; unload one first", param="lora_name")
            self._adapters[name] = ServedAdapter(ref, int(time.time()))
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Unload an adapter and return a message for the client. Running requests go on. Raises
        AdapterNotFound."""
        if self._adapters.pop(name, None) is None:
            raise AdapterNotFound(f"The LoRA adapter '{name:.200}' cannot be found.", param="lora_name")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _read(self, name: str, path: str) -> AdapterRef:
        try:
            folder = resolve_adapter(path)
        except SetupError as error:
            raise AdapterNotFound(str(error), param="lora_path") from error
        try:
            files = read_adapter(folder, rank_max=self._rank_max)
            self._check(files, folder)
            check_values(files)
            return AdapterRef(name, path, digest_adapter(folder))
        except SetupError as error:
            raise ClientError(str(error), param="lora_path") from error

    def _check(self, files: AdapterFiles, folder: Path) -> None:
        """Raise SetupError if the adapter belongs to another model."""
        for module in files.modules:
            target = module.name.rsplit(".", 1)[-1]
            if target not in TARGETS:
                raise SetupError(
                    f"adapter {folder}: target module {target} is not supported, only "
                    f"{', '.join(sorted(TARGETS))}"
                )
            layer = _LAYER.search(module.name)
            if layer is not None and 0 < self._card.layer_count <= int(layer[1]):
                raise SetupError(
                    f"adapter {folder}: {module.name} is of another base model: {self._base} has "
                    f"{self._card.layer_count} layers"
                )
            size = module.a.shape[1]
            if target in READS_HIDDEN and self._card.hidden_size not in (0, size):
                raise SetupError(
                    f"adapter {folder}: {module.name} is of another base model: its input has {size} values, "
                    f"that of {self._base} has {self._card.hidden_size}"
                )
