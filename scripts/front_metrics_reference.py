"""The section of the metrics' page about a server with several models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from moeserve.config import ServerConfig
from moeserve.front.config import ServedModel
from moeserve.front.memory import Memory
from moeserve.front.metrics import FrontMetrics
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Surroundings


def front_metrics() -> Iterator[str]:
    yield from (
        "## Several models",
        "",
        "A server with [several models](../how-to/serve-several-models.md) has these; the models' own metrics are at",
        "`/metrics?model=NAME`. If the front process is lost, its counters go on where the last scrape or heartbeat",
        "has seen them; heartbeats come four times within `--step-timeout`.",
        "",
        "| metric | kind | meaning |",
        "|---|---|---|",
    )
    for family in front_families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{name}` | {family.type} | {family.documentation} |"
    yield ""


def front_families() -> list[Family]:
    """Its metrics, but those of the process."""
    served = ServedModel(ServerConfig(served_model_name="model"))
    pool = ModelPool(
        [served], cast(Surroundings, None), Memory(0), load_timeout=1.0, idle_limit=None, max_waiting=1
    )
    with TemporaryDirectory() as folder:
        text = FrontMetrics(pool, Path(folder)).render()[0].decode()
    found = text_string_to_metric_families(text)
    return [family for family in found if family.name.startswith("moeserve:")]
