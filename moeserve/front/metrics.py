"""The front's metrics: requests, and the loads of each model. A model's own metrics are at `/metrics?model=NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from moeserve.front.memory import Memory
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.schedule import State
from moeserve.httpserver.batches.runner import BatchCounts
from moeserve.httpserver.observability.kept_counters import KeptCounters
from moeserve.messages.refusal import Refusal

LABELS: Final = ("model_name",)
KEPT_FILE: Final = "front-counters.json"  # in the runtime directory
_COUNTERS: Final = {
    "loads": ("Loads of the model that worked.", "num_loads"),
    "load_failures": ("Loads of the model that failed.", "num_failures"),
    "evictions": ("Times the model was unloaded to make room for another.", "num_evictions"),
    "losses": ("Times the model's server ended by itself.", "num_losses"),
    "requests_sent_again": (
        "Requests that were sent to the model's next server, because one was lost before their first output.",
        "num_sent_again",
    ),
    "load_seconds": ("Seconds of all loads that worked.", "load_seconds"),
    "load_wait_seconds": ("Seconds that requests waited for the model, all together.", "wait_seconds"),
}


class FrontMetrics(BatchCounts):
    def __init__(self, pool: ModelPool, directory: Path) -> None:
        """directory: a file in it keeps the counters for the front process after this one."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        counted = CollectorRegistry(auto_describe=False)
        counted.register(PoolCollector(pool))
        self._kept = KeptCounters(counted, directory / KEPT_FILE)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._kept)
        ProcessCollector(registry=self._registry)
        self._answers = Counter(
            "moeserve:front_http_requests",
            "HTTP requests that the front answered or passed on, by method, handler (route) and status.",
            ("method", "handler", "status"),
            registry=counted,
        )
        refused = Counter(
            "moeserve:front_request_refusals",
            "HTTP requests that the front refused, by reason.",
            ("reason",),
            registry=counted,
        )
        self._refused = {reason: refused.labels(reason) for reason in Refusal}
        batch_requests = Counter(
            "moeserve:front_batch_requests",
            "Requests of batches that were answered, by outcome: succeeded or errored.",
            ("outcome",),
            registry=counted,
        )
        self._batch_requests = {one: batch_requests.labels(one) for one in ("succeeded", "errored")}
        self._batch_requests_left = Gauge(
            "moeserve:front_batch_requests_left",
            "Requests of batches that are not answered yet.",
            registry=counted,
        )

    def answered(self, method: str, handler: str, status: int) -> None:
        self._answers.labels(method, handler, str(status)).inc()

    def refused(self, reason: Refusal) -> None:
        self._refused[reason].inc()

    def batch_request(self, outcome: str) -> None:
        self._batch_requests[outcome].inc()

    def batch_requests_left(self, count: int) -> None:
        self._batch_requests_left.set(count)

    def keep(self) -> None:
        """Writes the counters to the file. Each rendering does so too."""
        self._kept.keep()

    def render(self) -> tuple[bytes, str]:
        """Returns the exposition text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class PoolCollector(Collector):
    """Reads the pool at each scrape."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        models = self._pool.listed
        for name, (text, attribute) in _COUNTERS.items():
            counter = CounterMetricFamily(f"moeserve:model_{name}", text, labels=LABELS)
            for model in models:
                counter.add_metric([model.name], getattr(model, attribute))
            yield counter
        yield CounterMetricFamily(
            "moeserve:model_swaps", "Loads that began, of all models.", value=self._pool.num_swaps
        )
        yield _gauge("running_requests", "Requests that the model's server has.", models, "running")
        yield _gauge("running_lines", "Lines of batches that the model's server has.", models, "num_lines")
        yield _gauge(
            "last_load_seconds", "Seconds of the model's last load that worked.", models, "last_load_seconds"
        )
        yield _gauge(
            "most_swaps_waited",
            "The most loads of other models that began while a request waited for this one.",
            models,
            "most_swaps_waited",
        )
        waiting = GaugeMetricFamily(
            "moeserve:model_waiting_requests", "Requests that wait for the model to be loaded.", labels=LABELS
        )
        state = GaugeMetricFamily(
            "moeserve:model_state",
            f"1 for the model's state ({', '.join(State)}), 0 for the others.",
            labels=(*LABELS, "state"),
        )
        for model in models:
            waiting.add_metric([model.name], len(model.tickets))
            for one in State:
                state.add_metric([model.name, one], model.state is one)
        yield waiting
        yield state
        yield from self._memory()

    def _memory(self) -> Iterator[Metric]:
        kinds = (*LABELS, "kind")
        need = GaugeMetricFamily(
            "moeserve:model_memory_bytes",
            "Memory that the model needs by plan, with full pools, by kind (ram, gpu).",
            labels=kinds,
        )
        for model in self._pool.listed:
            if model.need is not None:
                _add(need, [model.name], model.need)
        yield need
        budget = GaugeMetricFamily(
            "moeserve:models_memory_budget_bytes",
            "Memory that loaded models may need together.",
            labels=("kind",),
        )
        _add(budget, [], self._pool.budget)
        yield budget
        used = GaugeMetricFamily(
            "moeserve:models_memory_used_bytes",
            "Memory that the loaded models need together, by plan.",
            labels=("kind",),
        )
        _add(used, [], self._pool.memory_used())
        yield used


def _gauge(name: str, text: str, models: Iterable[PooledModel], attribute: str) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"moeserve:model_{name}", text, labels=LABELS)
    for model in models:
        gauge.add_metric([model.name], getattr(model, attribute))
    return gauge


def _add(metric: GaugeMetricFamily, labels: list[str], memory: Memory) -> None:
    metric.add_metric([*labels, "ram"], memory.ram)
    metric.add_metric([*labels, "gpu"], memory.gpu)
    if len(memory.gpus) > 1:
        for number, size in enumerate(memory.gpus):
            metric.add_metric([*labels, f"gpu{number}"], size)
