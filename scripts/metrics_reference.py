"""The page of docs/ that lists the metrics, and the dashboard's row of those that no panel made by hand shows.

Both follow from what `/metrics` has. Links to explanations are in the sections' introductions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from moeserve.httpserver.observability.load_metrics import LoadCollector
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.messages.metric import Declared, declared_metrics
from moeserve.messages.router_metrics import LoadReport

# Sections of the page: the key of `_section_of`, the title, the introduction.
SECTIONS = (
    ("requests", "HTTP and requests", ""),
    (
        "router",
        "Router and worker",
        "They are the router's [LoadReport](../explanation/scheduling.md), and go on where a router is "
        "[replaced](../explanation/survival.md). "
        "[windowed-kv.md](../explanation/windowed-kv.md) explains the windowed layers' KV pool, "
        "[recurrent-state.md](../explanation/recurrent-state.md) snapshots of state.",
    ),
    (
        "tiers",
        "Tiers of the prefix cache",
        "[kv-tiers.md](../explanation/kv-tiers.md) explains the tier in RAM behind a GPU's KV pool and the one on "
        "disk (`--kv-disk`). All are 0 for a tier that there is not.",
    ),
    (
        "expert_disk",
        "Experts on disk",
        "[experts-on-disk.md](../explanation/experts-on-disk.md) explains it.",
    ),
    (
        "table_rows",
        "N-gram table",
        "[residual-streams.md](../explanation/residual-streams.md) explains it.",
    ),
    ("expert_cache", "Expert cache", "[expert-cache.md](../explanation/expert-cache.md) explains it."),
    (
        "process",
        "Process",
        "These are of the process that answers HTTP, which has the connections. The other processes' memory and CPU "
        "time are in the container's or the unit's metrics.",
    ),
    (
        "vllm",
        "Under vLLM's names",
        "For gateways, autoscalers and dashboards made for vLLM. Names that vLLM has given up are kept beside those "
        "that took their place. `GET /v1/loads` has the load as JSON, in SGLang's words.",
    ),
)
ROW = "Everything else the router counts"  # the dashboard's last row, made here
ROW_ID = 1000  # ids of its panels follow
SELECTED = '{instance=~"$instance", model_name=~"$model"}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def metrics_page(made: str) -> Iterator[str]:
    yield from (
        "# Metrics",
        "",
        made,
        "",
        "`GET /metrics` returns Prometheus text. Names and meanings are vLLM's where it has the like, under the prefix",
        "`moeserve:` and with the label `model_name`. Times are in seconds.",
        "[Monitor a server](../how-to/monitor-a-server.md) uses them in a dashboard and in alerts.",
        "",
    )
    text = Metrics("model").render()[0].decode()
    families = list(text_string_to_metric_families(text))
    reported = {family.name: "router" for family in LoadCollector("model").collect()}
    for declared in declared_metrics(LoadReport):
        if len(declared.path) > 1:
            own = ("expert_cache", "expert_disk", "table_rows")
            nested = declared.path[0] if declared.path[0] in own else "tiers"
            reported[f"moeserve:{declared.metric.name}"] = nested
    for section, title, introduction in SECTIONS:
        yield from (f"## {title}", "")
        if introduction:
            yield from (introduction, "")
        yield from ("| metric | kind | meaning |", "|---|---|---|")
        for family in families:
            if _section_of(family.name, reported) == section:
                yield f"| `{_exposed(family)}` | {family.type} | {family.documentation} |"
        yield ""


def _section_of(name: str, reported: dict[str, str]) -> str:
    if name.startswith("vllm:"):
        return "vllm"
    return reported.get(name, "requests" if name.startswith("moeserve:") else "process")


def _exposed(family: Family) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def dashboard(path: Path) -> Iterator[str]:
    """The lines of the dashboard: its panels made by hand as they are, the last row anew."""
    whole: dict[str, Any] = json.loads(path.read_text())
    by_hand = [panel for panel in whole["panels"] if panel["id"] < ROW_ID]
    shown = json.dumps(by_hand)
    missing = [
        declared
        for declared in declared_metrics(LoadReport)
        if f"moeserve:{declared.metric.name}" not in shown
    ]
    top = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in by_hand)
    panels = [_panel(declared, at, top + 1) for at, declared in enumerate(missing)]
    row = {
        "id": ROW_ID,
        "title": ROW,
        "type": "row",
        "collapsed": True,
        "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
        "panels": panels,
    }
    yield from json.dumps({**whole, "panels": [*by_hand, row]}, indent=1).splitlines()


def _panel(declared: Declared, at: int, top: int) -> dict[str, Any]:
    """The `at`-th panel of the row, whose panels begin at `top`: four beside each other."""
    metric = declared.metric
    name = f"moeserve:{metric.name}"
    if metric.kind == "counter":
        queries = [(f"sum(rate({name}_total{SELECTED}[$__rate_interval]))", "per second")]
    elif metric.kind == "gauge":
        queries = [(f"sum({name}{SELECTED})", "now")]
    else:
        rates = f"sum by (le) (rate({name}_bucket{SELECTED}[$__rate_interval]))"
        queries = [(f"histogram_quantile({share}, {rates})", f"p{share * 100:g}") for share in (0.5, 0.99)]
    units = {"bytes": "Bps" if metric.kind == "counter" else "bytes", "ms": "s"}
    return {
        "id": ROW_ID + 1 + at,
        "title": metric.name.replace("_", " "),
        "type": "timeseries",
        "datasource": SOURCE,
        "description": metric.help,
        "gridPos": {"h": 6, "w": 6, "x": at % 4 * 6, "y": top + at // 4 * 6},
        "targets": [
            {"refId": "AB"[number], "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(queries)
        ],
        "fieldConfig": {"defaults": {"unit": units.get(metric.unit, "short"), "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }
