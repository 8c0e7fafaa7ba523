"""The model of a drill: what may be asked of it, and the default one."""

import json
from pathlib import Path

from baton.core.errors import SetupError
from benchmarks.chaos.requests import CHAT_KINDS, KINDS, TOOL_KINDS

TEMPLATE = "chat_template.jinja"
TOOLS = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"


def vocabulary(folder: Path) -> int:
    """The number of token ids. Raises SetupError."""
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, KeyError, ValueError):
        raise SetupError(
            f"--model {folder}: a folder with a config.json that gives vocab_size is needed"
        ) from None


def kinds_for(folder: Path) -> dict[str, int]:
    """The kinds of requests that the model's template allows, with their weights."""
    template = _template(folder)
    left_out = () if "tools" in template else TOOL_KINDS if template else (*TOOL_KINDS, *CHAT_KINDS)
    return {kind: weight for kind, weight in KINDS.items() if kind not in left_out}


def _template(folder: Path) -> str:
    file, config = folder / TEMPLATE, folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    return str(json.loads(config.read_text()).get("chat_template") or "") if config.is_file() else ""


def allow_tools(folder: Path) -> None:
    """Let the template write the tools of a request, so that requests may have some."""
    (folder / TEMPLATE).write_text(TOOLS + _template(folder))


def make_default(folder: Path, *, budget_s: float) -> None:
    """Train the demo model, and let it be asked for tool calls."""
    from benchmarks.demo_model.make import make_demo_model  # it imports torch

    make_demo_model(folder, budget_s=budget_s)
    allow_tools(folder)
