"""LoRA adapters (arXiv 2106.09685) as PEFT writes them: `adapter_config.json` and
`adapter_model.safetensors`. No torch here: routers check and digest them too.

What would make the result differ from what the adapter's author meant is refused, never approximated.
"""

import hashlib
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from baton.core.errors import SetupError
from engine.model_files.json_files import read_json_object
from engine.model_files.resolve import resolve_model
from engine.model_files.safetensors_files import TensorEntry, read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_PIECE_BYTES = 1 << 20
_PATTERN_CHARACTERS_MAX = 200
_PATTERN_REPEATS_MAX = 3
_EXPONENT_BITS = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Unsigned integer type by dtype, and the bits that are all set in infinities and NaN only (IEEE 754)."""
_REFUSED_WHEN_SET = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
)
_CHANGES_THE_BASE = ("pissa", "olora", "loftq", "corda")
"""Ways to start training that move part of the base's weights into the adapter."""


class LoraModule(msgspec.Struct, frozen=True):
    """y += scale * (x @ A.T) @ B.T of one module."""

    name: str
    """Name as in the checkpoint, such as model.layers.0.self_attn.q_proj."""
    rank: int
    scale: float
    a: TensorEntry
    """[rank, in]"""
    b: TensorEntry
    """[out, rank]"""


class AdapterFiles(msgspec.Struct, frozen=True):
    folder: Path
    modules: tuple[LoraModule, ...]


def resolve_adapter(path_or_hub_id: str) -> Path:
    """Raises SetupError: no such folder, or it cannot be downloaded."""
    return resolve_model(path_or_hub_id, files=(CONFIG_FILE, WEIGHTS_FILE), what="adapter")


def read_adapter(folder: Path, *, rank_max: int) -> AdapterFiles:
    """Raises SetupError: files missing or damaged, a kind of adapter that is not supported, or a rank
    above `rank_max`."""
    config = _config(folder / CONFIG_FILE)
    _refuse_unsupported(config, folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise SetupError(f"{folder} has no {WEIGHTS_FILE}")
    _, entries = read_header(folder / WEIGHTS_FILE)
    modules = tuple(_module(config, name, pair, folder) for name, pair in _pairs(entries, folder).items())
    for module in modules:
        if module.rank > rank_max:
            raise SetupError(
                f"adapter {folder}: rank {module.rank} of {module.name} is above "
                f"engine.adapter_rank_max={rank_max}"
            )
    return AdapterFiles(folder, modules)


def check_values(files: AdapterFiles) -> None:
    """Raises SetupError: a tensor is of an unsupported dtype, or has a number that is not finite."""
    for module in files.modules:
        for side, entry in (("A", module.a), ("B", module.b)):
            name = f"{module.name}.lora_{side}.weight"
            if entry.dtype not in _EXPONENT_BITS:
                raise SetupError(
                    f"adapter {files.folder}: {name} is {entry.dtype}, which is not supported; supported are "
                    f"{', '.join(_EXPONENT_BITS)}"
                )
            if not _is_finite(entry):
                raise SetupError(
                    f"adapter {files.folder}: {name} has numbers that are not finite (NaN or infinity); "
                    "its training or conversion went wrong"
                )


def _is_finite(entry: TensorEntry) -> bool:
    dtype, exponent = _EXPONENT_BITS[entry.dtype]
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            left = entry.end - entry.start
            while left > 0:
                piece = stream.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise SetupError(f"{entry.file} is truncated")
                bits = np.frombuffer(piece, dtype=dtype)
                if bool(((bits & exponent) == exponent).any()):
                    return False
                left -= len(piece)
    except OSError as error:
        raise SetupError(f"cannot read {entry.file}: {error}") from error
    return True


def digest_adapter(folder: Path) -> str:
    """64 hex digits over both files, whole. Raises SetupError: unreadable."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (folder / name).open("rb") as stream:
                digest.update((folder / name).stat().st_size.to_bytes(8, "little"))
                while piece := stream.read(_PIECE_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise SetupError(f"cannot read adapter {folder}: {error}") from error
    return digest.hexdigest()


def _config(path: Path) -> Mapping[str, Any]:
    value = read_json_object(path)
    if value is None:
        raise SetupError(f"{path.parent} has no {CONFIG_FILE}: not a PEFT adapter")
    return value


def _refuse_unsupported(config: Mapping[str, Any], folder: Path) -> None:
    kind: object = config.get("peft_type")
    if kind != "LORA":
        raise SetupError(f"adapter {folder}: peft_type {kind!s:.100} is not supported; supported is LORA")
    if config.get("bias", "none") != "none":
        raise SetupError(
            f"adapter {folder}: bias={config['bias']!s:.100} is not supported; supported is none"
        )
    for field in _REFUSED_WHEN_SET:
        if config.get(field):
            raise SetupError(f"adapter {folder}: {field} is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise SetupError(
            f"adapter {folder}: init_lora_weights={start:.100} changes the base model; convert the adapter "
            "to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )


def _pairs(entries: Mapping[str, TensorEntry], folder: Path) -> dict[str, dict[str, TensorEntry]]:
    """The tensors A and B of each module, by module name."""
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for name in sorted(entries):
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise SetupError(f"adapter {folder}: tensor {name} is not a LoRA matrix, which is not supported")
        pairs.setdefault(found["module"], {})[found["side"]] = entries[name]
    if not pairs:
        raise SetupError(f"adapter {folder}: {WEIGHTS_FILE} has no tensors")
    return pairs


def _module(
    config: Mapping[str, Any], name: str, pair: Mapping[str, TensorEntry], folder: Path
) -> LoraModule:
    if len(pair) != 2:
        raise SetupError(f"adapter {folder}: {name} has no lora_{'B' if 'A' in pair else 'A'}")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] < 1:
        raise SetupError(
            f"adapter {folder}: {name} has A {list(a.shape)} and B {list(b.shape)}; wanted are "
            "[rank, in] and [out, rank]"
        )
    rank = a.shape[0]
    said = _by_pattern(config, "rank_pattern", name, config.get("r", rank), folder)
    if said != rank:
        raise SetupError(f"adapter {folder}: {name} has rank {rank}, {CONFIG_FILE} says {said:g}")
    alpha = _by_pattern(config, "alpha_pattern", name, config.get("lora_alpha", 8), folder)
    # Rank-stabilised LoRA: arXiv 2312.03732.
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraModule(name, rank, scale, a, b)


def _by_pattern(config: Mapping[str, Any], field: str, module: str, default: object, folder: Path) -> float:
    """The value whose key, a regular expression, matches the module's name or the end of it after a dot;
    the first one, as in PEFT."""
    patterns: object = config.get(field) or {}
    value = default
    if isinstance(patterns, dict):
        for pattern, candidate in cast(dict[str, Any], patterns).items():
            if _matches(pattern, module, folder):
                value = candidate
                break
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise SetupError(
            f"adapter {folder}: {field or 'rank'} of {module} is {value!r:.100}, which is no number"
        )
    return float(value)


def _matches(pattern: str, module: str, folder: Path) -> bool:
    if len(pattern) > _PATTERN_CHARACTERS_MAX:
        raise SetupError(f"adapter {folder}: a pattern of {len(pattern)} characters is too long")
    if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > _PATTERN_REPEATS_MAX:
        # Such can take hours on a name of thirty characters, and anybody can publish an adapter.
        raise SetupError(f"adapter {folder}: the pattern {pattern!r} repeats too much")
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error as error:
        raise SetupError(f"adapter {folder}: {pattern!r} is no regular expression: {error}") from error
