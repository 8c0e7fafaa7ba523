"""Builds one frozen `Config` from the command line and the environment, or one clear error line."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_settings import SettingsError

from baton.config import Config, sections
from baton.config.models import OWN_SECTIONS
from baton.core.errors import SetupError
from commands.models_file import read_models

_OF_MODEL = re.compile(rf"(.+?)\.({'|'.join(OWN_SECTIONS)})\.(.+)")


def load_config(
    sets: Sequence[str] = (), flags: Mapping[str, Any] | None = None, *, models: Path | None = None
) -> Config:
    """`sets` are "section.field=value" texts. `flags` are the short options by the same dotted names; None
    means not given. `models` is a file that names several models.

    Precedence: flags, sets, file, environment, defaults. Raises SetupError.
    """
    values: dict[str, dict[str, Any]] = {} if models is None else {"models": read_models(models)}
    for text in sets:
        name, separator, value = text.partition("=")
        if not separator:
            raise SetupError(f"--set {text}: write section.field=value, for example transfer.lease_s=5")
        _put(values, name.strip(), value.strip())
    for name, value in (flags or {}).items():
        if value is not None:
            _put(values, name, value)
    try:
        return Config(**values)  # pyright: ignore[reportArgumentType] - validated by pydantic
    except ValidationError as error:
        raise SetupError(_explain(error)) from error
    except SettingsError as error:
        raise SetupError(f"environment: {error}") from error


def overlay(config: Config, sets: Sequence[str]) -> Config:
    """`config`, which has one model, with these settings changed. Raises SetupError."""
    values: dict[str, dict[str, Any]] = config.model_dump()
    for text in sets:
        name, separator, value = text.partition("=")
        if not separator:
            raise SetupError(f"--set {text}: write section.field=value, for example transfer.lease_s=5")
        _put(values, name.strip(), value.strip())
    try:
        made = Config(**values)  # pyright: ignore[reportArgumentType] - validated by pydantic
        return made.model_copy(update={"models": {}})  # drop models that the environment may define
    except ValidationError as error:
        raise SetupError(_explain(error)) from error


def _put(values: dict[str, dict[str, Any]], name: str, value: Any) -> None:
    section, separator, field = name.partition(".")
    if not separator or section not in Config.model_fields:
        known = ", ".join(Config.model_fields)
        raise SetupError(f"{name}: no such setting{_meant(name)}; sections are {known} (see `baton config`)")
    if section == "models":
        _put_of_model(values.setdefault("models", {}), field, value)
        return
    field, *path = field.split(".")
    kind = _kind_of(section, field)
    if path and kind is dict:
        inner = values.setdefault(section, {}).setdefault(field, {})
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict):
            raise SetupError(f"{name}: a part of it was set to {inner!r} before, so leave one of the two out")
        inner[path[-1]] = value
        return
    values.setdefault(section, {})[".".join([field, *path])] = _parsed(value, kind)


def _put_of_model(models: dict[str, Any], name: str, value: Any) -> None:
    """`name` is MODEL.SECTION.FIELD, and a model's name may have dots."""
    found = _OF_MODEL.fullmatch(name)
    if found is None:
        sections = ", ".join(OWN_SECTIONS)
        raise SetupError(f"models.{name}: write models.NAME.SECTION.FIELD; sections are {sections}")
    model, section, field = found.groups()
    _put(models.setdefault(model, {}), f"{section}.{field}", value)


def _kind_of(section: str, field: str) -> Any:
    """The container type of a list or dict setting; None for all other settings."""
    info = sections()[section].model_fields.get(field)
    return None if info is None else get_origin(info.annotation)


def _parsed(value: Any, kind: Any) -> Any:
    """Lists are JSON or comma-separated, maps are JSON. Pydantic reads everything else from text."""
    if kind not in (tuple, dict) or not isinstance(value, str):
        return value
    if value.startswith("[" if kind is tuple else "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # pydantic reports the error
    return value if kind is dict else [part.strip() for part in value.split(",") if part.strip()]


def _explain(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    # A list with a wrong entry is also reported as too short, since only right entries count.
    parents = {d["loc"][:n] for d in details for n in range(len(d["loc"]))}
    details = [d for d in details if d["type"] != "too_short" or d["loc"] not in parents]
    texts = [_explain_one(".".join(str(part) for part in d["loc"]), d) for d in details]
    return "; ".join(texts)


def _explain_one(name: str, detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        return f"{name}: no such setting{_meant(name)} (see `baton config`)"
    if detail["type"] == "value_error" and not name:
        return detail["msg"].removeprefix("Value error, ")  # the message names the setting
    if detail["type"] == "value_error" and isinstance(detail["input"], dict):
        # the message is about several settings at once
        return f"{name}: {detail['msg'].removeprefix('Value error, ')}"
    if f'"{detail["input"]}"' in detail["msg"]:  # the message quotes the value
        return f"{name}: {detail['msg']}"
    return f"{name}: {detail['msg']}, not {detail['input']!r}"


def _meant(name: str) -> str:
    """Return a question that names the setting which somebody may have meant; empty: none is like it."""
    known = [f"{section}.{field}" for section, kind in sections().items() for field in kind.model_fields]
    same_field = [one for one in known if one.partition(".")[2] == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    # Where the section exists, the field is more often in another one than misspelt.
    close = same_field or close if name.partition(".")[0] in sections() else close or same_field
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def settings() -> Iterator[tuple[str, str, Any, str, str]]:
    """Name, type, default, environment variable and documentation of every setting."""
    yield "models", "map", {}, "BATON_MODELS", Config.model_fields["models"].description or ""
    for section, section_class in sections().items():
        properties = section_class.model_json_schema()["properties"]
        for field, info in section_class.model_fields.items():
            variable = f"BATON_{section.upper()}__{field.upper()}"
            kind = _kind(properties[field])
            yield f"{section}.{field}", kind, info.default, variable, info.description or ""


def _kind(schema: Mapping[str, Any]) -> str:
    """The type and bounds of a JSON schema in a few words."""
    if choices := schema.get("enum"):
        return " | ".join(map(str, choices))
    if items := schema.get("items"):
        return f"list of {_kind(items)}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in schema
    ]
    return " ".join([str(schema.get("type", "")), ", ".join(bounds)]).strip()
