"""What a PromQL expression names: enough of a reader to check dashboards and alerts against /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "moeserve.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"

_METRIC = re.compile(r"(moeserve:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Named:
    """One metric of an expression, with its matchers (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def metrics_of(expression: str) -> list[Named]:
    return [
        Named(name, tuple(_MATCHER.findall(selector or ""))) for name, selector in _METRIC.findall(expression)
    ]


def groupings_of(expression: str) -> set[str]:
    return {label.strip() for group in _GROUPING.findall(expression) for label in group.split(",")}


def dashboard_panels() -> Iterator[dict[str, Any]]:
    """Those within collapsed rows included."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """(panel, expression)"""
    for panel in dashboard_panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alert_expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def without_variables(expression: str) -> str:
    """As Grafana would send it, with everything selected."""
    expression = expression.replace("$__rate_interval", "1m")
    return re.sub(r'=~"\$\w+"', '=~".*"', expression)
