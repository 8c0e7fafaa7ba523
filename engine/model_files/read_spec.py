"""Reader of a model folder's `ModelSpec`. No torch here.

Anything that would make the result differ from what the model's authors meant (an activation, a rope variant,
a router that is not known) is refused with a SetupError, never approximated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from baton.core.errors import SetupError
from engine.model_files.fallback_spec import read_fallback_spec
from engine.model_files.families import FAMILIES
from engine.model_files.fields import Fields, read_eos_token_ids
from engine.model_files.json_files import read_json_object
from engine.model_files.quant_scheme import parse_scheme
from engine.model_files.spec import ModelSpec

_OF_THE_WHOLE = ("architectures", "dtype", "torch_dtype", "eos_token_id", "quantization_config")


def load_spec(folder: Path) -> ModelSpec:
    """Raises SetupError: no such folder, no config.json, broken JSON, or see `parse_spec`."""
    if not folder.is_dir():
        raise SetupError(f"model folder {folder} does not exist")
    config = read_json_object(folder / "config.json")
    if config is None:
        raise SetupError(f"{folder} has no config.json: not a Hugging Face model folder")
    generation = read_json_object(folder / "generation_config.json")
    return parse_spec(config, generation=generation, where=str(folder / "config.json"))


def parse_spec(
    config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelSpec:
    """`config` and `generation` are the contents of config.json and generation_config.json.

    Raises SetupError: not a supported model, or a field that is missing or makes no sense.
    """
    fields = Fields(text_config(config), where)
    architecture = _architecture(fields)
    family = FAMILIES.get(architecture)
    if family is None:
        spec = read_fallback_spec(architecture, fields)
    else:
        spec = family.read(architecture, fields.with_defaults(family.defaults))
    return replace(
        spec,
        eos_token_ids=read_eos_token_ids(fields, generation or {}),
        quantization=parse_scheme(fields.data, where),
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Models that also see have their language model's fields in `text_config`; what the outer object
    says of the whole stays."""
    inner: object = config.get("text_config")
    if not isinstance(inner, dict):
        return dict(config)
    outer = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    return {**config, **cast(dict[str, Any], inner), **outer}


def _architecture(fields: Fields) -> str:
    names: object = fields.data.get("architectures")
    listed = [f"{name!s:.100}" for name in cast(list[object], names)] if isinstance(names, list) else []
    if not listed:
        raise SetupError(
            f"{fields.where}: architecture none is not supported: `architectures` is {names!r:.100}"
        )
    return next((name for name in listed if name in FAMILIES), listed[0])
