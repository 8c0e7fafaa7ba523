"""Generates the chart's README.md: every value with its type, its default and what its comment says.

Run `python -m commands.chart_readme CHART_FOLDER [FILE]`.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from commands.chart import values_schema

HEAD = """# Chart of Baton

Serves large language models with prefill and decode on separate pools. docs/operations.md, "On Kubernetes",
says what it needs, how to install it and what each part does; `deploy/helm/values` has values for whole
clusters, and `ci` some for single features. Settings of `baton config` go under `config`.

```
helm install baton deploy/helm/baton --namespace baton --create-namespace \\
  --set images.registry=registry.example.com --set model.path=Qwen/Qwen3-8B
```

| value | type | default | meaning |
|---|---|---|---|
"""

WHOLE = {"config", "models"}
"""Values whose parts are described elsewhere."""

SAME = {"pools.decode": "pools.prefill", "pools.aggregated": "pools.prefill"}
"""Values that have the same parts as others."""

ENTRY = re.compile(r"^( *)([A-Za-z0-9_.-]+):")


def comments(text: str) -> dict[str, str]:
    """Return the comment above each value of a values file, by the value's path. Pure."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
        elif entry := ENTRY.match(line):
            indent = len(entry[1])
            path = [*((at, name) for at, name in path if at < indent), (indent, entry[2])]
            found[".".join(name for _, name in path)] = " ".join(above)
            above = []
        else:
            above = []
    return found


def rows(schema: Mapping[str, Any], values: Any, where: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, type and default of every value of a schema. Objects with known parts are their parts."""
    for name, part in schema["properties"].items():
        path = f"{where}.{name}" if where else name
        default = values.get(name) if isinstance(values, dict) else None
        if path in SAME:
            yield path, f"as {SAME[path]}", None
        elif part.get("properties") and path not in WHOLE:
            yield from rows(part, default, path)
        else:
            yield path, kind_of(part), default


def kind_of(part: Mapping[str, Any]) -> str:
    """Return a value's type in words."""
    if "enum" in part:
        return " or ".join(str(choice) or "nothing" for choice in part["enum"])
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(kind_of(one) for one in part["anyOf"]))
    if part.get("type") == "array":
        return f"list of {kind_of(part['items'])}"
    return str(part.get("type", "any"))


def readme(chart: Path) -> str:
    """Return the text of the README of the chart in this folder."""
    text = (chart / "values.yaml").read_text()
    values, said = yaml.safe_load(text), comments(text)
    lines = [
        f"| `{path}` | {kind} | {_shown(default)} | {said.get(path, '').replace('|', '/')} |"
        for path, kind, default in rows(values_schema(), values)
    ]
    return HEAD + "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if default is None:
        return ""
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def main() -> None:
    chart = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else chart / "README.md"
    target.write_text(readme(chart))


if __name__ == "__main__":
    main()
