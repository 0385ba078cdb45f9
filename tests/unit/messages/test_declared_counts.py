"""A count is declared once: in LoadReport, where all that shows it looks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.metric import Family, HistogramCounts, Metric, declared_metrics, with_totals_of
from moeserve.messages.pages import TierCounts
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.table_rows import TableRowCounts

REPOSITORY = Path(__file__).parents[3]


def test_every_count_is_declared() -> None:
    for struct in (LoadReport, TierCounts, ExpertCacheCounts):
        hints = get_type_hints(struct, include_extras=True)
        for name in struct.__struct_fields__:
            declarations = [one for one in get_args(hints[name])[1:] if isinstance(one, Metric | Family)]
            assert declarations or hints[name] == list[str], f"{struct.__name__}.{name}"


def test_metrics_names_are_prometheus_and_differ() -> None:
    metrics = [declared.metric for declared in declared_metrics(LoadReport)]
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    for metric in metrics:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert not metric.name.endswith("_total") or metric.kind == "gauge", "counters get it"
        assert metric.help.endswith(".")
        if metric.unit in ("ms", "bytes"):
            assert metric.name.endswith({"ms": "_seconds", "bytes": "bytes"}[metric.unit])


def test_counters_and_histograms_add_up_and_gauges_do_not() -> None:
    """Every field is covered, nested ones included: a total that is left out falls when a router is replaced."""

    frozen = {
        "expert_cache": ExpertCacheCounts,
        "expert_disk": ExpertDiskCounts,
        "table_rows": TableRowCounts,
    }

    def filled(number: int) -> LoadReport:
        report = LoadReport()
        for declared in declared_metrics(LoadReport):
            *way, last = declared.path
            holder: msgspec.Struct = report
            for name in way:
                holder = getattr(holder, name)
            if declared.metric.kind == "histogram":
                getattr(holder, last).add(number)
            elif declared.path[0] not in frozen:
                setattr(holder, last, number)
        for name, counts in frozen.items():
            setattr(report, name, counts(*[number] * len(counts.__struct_fields__)))
        return report

    both = with_totals_of(filled(3), filled(4))
    for declared in declared_metrics(LoadReport):
        value = declared.value_in(both)
        expected = 4 if declared.metric.kind == "gauge" else 7
        if isinstance(value, HistogramCounts):
            assert (sum(value.counts), value.sum) == (2, 7)
        else:
            assert value == expected, declared


# ---------------------------------------------------------------- a toy

DECLARED_IN = "moeserve/messages/router_metrics.py"
RAISED_IN = "moeserve/router/core/scheduler.py"
DECLARATION = """    toys: Annotated[int, Metric("counter", "toys_broken", "Toys that a client broke.")] = 0
"""
NEEDED = ("messages", "router/core", "httpserver/observability", "sampling")
PROGRAM = """
import sys
from pathlib import Path

from metrics_reference import dashboard, metrics_page
from moeserve.httpserver.observability.load_totals import LoadTotals
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.messages import codec
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler

scheduler = Scheduler(Limits(100, 4, 100, 4, 10))
scheduler.add(GenerateRequest(1, bytes(8), SamplingParams(max_tokens=3), TextOptions(), 0.0))
scheduler.abort(1)
received = codec.TO_HTTP.decode(codec.encode(scheduler.load_report()))
totals, metrics = LoadTotals(), Metrics("m")
totals.of(received)
totals.start_again()
metrics.reported.load = totals.of(received)
print(next(line for line in metrics.render()[0].decode().splitlines() if line.startswith("moeserve:toys_broken_total")))
print(next(line for line in metrics_page("") if "toys_broken" in line))
print(next(line.strip() for line in dashboard(Path(sys.argv[1])) if "rate(moeserve:toys_broken_total" in line))
"""


def test_a_toy_counter_takes_two_edits(tmp_path: Path) -> None:
    """Its declaration, and where it is raised. What is wanted of it is at the end of PROGRAM: the router's report, the
    sum over two routers, /metrics, its page and the dashboard."""
    for folder in NEEDED:
        shutil.copytree(REPOSITORY / "moeserve" / folder, tmp_path / "moeserve" / folder)
    for file in ("__init__.py", "router/__init__.py", "httpserver/__init__.py"):
        shutil.copy(REPOSITORY / "moeserve" / file, tmp_path / "moeserve" / file)
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")

    declared, raised = tmp_path / DECLARED_IN, tmp_path / RAISED_IN
    text = declared.read_text()
    declared.write_text(text.replace("    num_running: Annot", DECLARATION + "    num_running: Annot", 1))
    text = raised.read_text()
    aborted = "        self._totals.aborts += 1\n"
    assert text.count(aborted) == 1
    raised.write_text(text.replace(aborted, aborted + "        self._totals.toys += 1\n"))

    dashboard = REPOSITORY / "deploy" / "grafana" / "dashboards" / "moeserve.json"
    path = ":".join([str(tmp_path), str(tmp_path / "scripts"), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-SP", "-c", PROGRAM, str(dashboard)],  # neither the installed package nor this one
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exposed, documented, shown = done.stdout.splitlines()
    assert exposed == 'moeserve:toys_broken_total{model_name="m"} 2.0'
    assert documented == "| `moeserve:toys_broken_total` | counter | Toys that a client broke. |"
    assert "$__rate_interval" in shown
