"""Dashboards as Grafana's JSON (schema version 39, Grafana 10 and later). Pure."""

from typing import Any

from baton.telemetry.catalogue import QUEUED
from baton.telemetry.panels import Dashboard, Panel, Query

SCHEMA_VERSION = 39
WIDTH, HEIGHT = 8, 8
"""Size of a panel; a row is 24 wide."""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def model(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["baton"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True}],
        "templating": {"list": _variables()},
        "panels": _panels(dashboard),
    }


def _variables() -> list[dict[str, Any]]:
    namespaces = f"label_values({QUEUED.name}, namespace)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "label": "Namespace",
            "datasource": SOURCE,
            "query": {"query": namespaces, "refId": "namespace"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": place})
        y += 1
        for index, panel in enumerate(row.panels):
            column = index % (24 // WIDTH)
            y += HEIGHT if index and column == 0 else 0
            place = {"x": column * WIDTH, "y": y, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += HEIGHT
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.is_stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 60}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.is_share:
        defaults["max"] = 1
    if "bias" in panel.title.lower():
        del defaults["min"]  # below 0: too little was predicted
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": _description(panel),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [_target(query, index) for index, query in enumerate(panel.queries)],
    }


def _description(panel: Panel) -> str:
    quiet = dict.fromkeys(query.quiet for query in panel.queries if query.quiet)
    empty = f"May be empty {' or '.join(quiet)}." if quiet else ""
    return " ".join(filter(None, (panel.description, empty)))


def _target(query: Query, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
    }
