"""A model's own sampling, for requests that leave a field out: its authors' choice, or the operator's.

The fields are those that vLLM takes from a generation_config.json. A GGUF file's `general.sampling.*` arrive
in the same file, see `engine.model_files.gguf.folder`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import SetupError
from engine.model_files.json_files import read_json_object

FILE = "generation_config.json"
OFF = ("none", "vllm")
"""Values of `model.generation_config` that use no file; the second is vLLM's word."""
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "max_new_tokens": (1, 2**31 - 1),
}
"""Bounds of the fields, as requests have them."""
_WHOLE = ("top_k", "max_new_tokens")


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values for fields that a request leaves out. None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Most tokens of any answer, whatever its request asks for."""


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(folder: Path, source: str, overrides: Mapping[str, float]) -> SamplingDefaults:
    """Return the defaults of the model in `folder`.

    `source` is the setting `model.generation_config`: auto, none, or a folder. `overrides` come before what
    the file says. Raises SetupError: no such file in a folder that is named, or a value that cannot be used.
    """
    found: dict[str, Any] = {}
    if source not in OFF:
        place = folder if source == "auto" else Path(source)
        file = place / FILE
        content = read_json_object(file)
        if content is None and source != "auto":
            raise SetupError(
                f"model.generation_config: {place} has no {FILE}; name a folder that has one, auto, or none"
            )
        said = {name: value for name, value in (content or {}).items() if value is not None}
        advice = "; mend it, or set model.generation_config=none"
        found = _checked({name: said[name] for name in BOUNDS if name in said}, f"{file}: ", advice)
    return SamplingDefaults(**found | check_overrides(overrides))


def check_overrides(overrides: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of `model.generation_overrides`. Raises SetupError."""
    where = "model.generation_overrides: "
    if unknown := [name for name in overrides if name not in BOUNDS]:
        raise SetupError(f"{where}{unknown[0]!r:.60} is none of {', '.join(BOUNDS)}")
    return _checked(overrides, where, "")


def _checked(values: Mapping[str, Any], where: str, advice: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        low, high = BOUNDS[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name in _WHOLE and value != int(value)):
            what = "a whole number" if name in _WHOLE else "a number"
            raise SetupError(f"{where}{name} must be {what} from {low} to {high}, not {value!r:.60}{advice}")
        found[name] = int(value) if name in _WHOLE else float(value)
    return found
