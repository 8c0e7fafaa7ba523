"""Prints the settings for `baton config`."""

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from baton.config import Config
from baton.config.base import secret_fields
from baton.files.terminal import new_console
from commands.settings import load_config, settings
from kv_store.directory.redis_url import masked


def show(sets: Sequence[str], *, as_schema: bool) -> None:
    """Raises SetupError for bad values."""
    if as_schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
        return
    config = load_config(sets)
    values = config.model_dump()
    console = new_console()
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column("setting", no_wrap=True)
    for heading in ("value", "type", "meaning"):
        table.add_column(heading, overflow="fold")
    for name, kind, default, _, meaning in settings():
        section, _, field = name.partition(".")
        value = values[section][field] if field else values[section]
        style = "" if value == default else "bold"
        if value and field and field in secret_fields(type(getattr(config, section))):
            value = masked(value) if "://" in value else "***"
        table.add_row(Text(name), Text(_shown(value), style), Text(kind), Text(" ".join(meaning.split())))
    console.print(table)
    console.print(
        "Change a setting with --set section.field=value, or in the environment: BATON_SECTION__FIELD=value."
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value) if value != "" else '""'
