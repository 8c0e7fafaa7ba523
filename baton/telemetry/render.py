"""Write the rules and dashboards that the chart carries: `python -m baton.telemetry.render FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from baton.telemetry.alerts import rules
from baton.telemetry.grafana import model
from baton.telemetry.panels import DASHBOARDS

HEAD = "# Generated from baton/telemetry: `make chart`.\n"


def rendered() -> dict[str, str]:
    """Return the content of each generated file by its name, relative to the chart."""
    files: dict[str, str] = {"rules/baton.yaml": HEAD + _yaml(rules())}
    for dashboard in DASHBOARDS:
        text = json.dumps(model(dashboard), indent=2, ensure_ascii=False)
        files[f"dashboards/{dashboard.uid}.json"] = text + "\n"
    return files


def _yaml(content: dict[str, Any]) -> str:
    # Expressions stay on one line.
    return yaml.safe_dump(content, sort_keys=False, width=10_000, allow_unicode=True)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, text in rendered().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
