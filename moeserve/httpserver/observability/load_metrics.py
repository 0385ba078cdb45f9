"""Metrics from the router's and the worker's reports: the fields of LoadReport, and metrics computed from these
fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from moeserve.messages.adapters import ServedAdapter
from moeserve.messages.metric import Declared, declared_metrics
from moeserve.messages.router_metrics import LoadReport

LABELS: Final = ("model_name",)


class LoadCollector(Collector):
    """Exports the newest report. Totals count from the server's start."""

    def __init__(self, model_name: str) -> None:
        self._labels = [model_name]
        self.load = LoadReport()
        self.adapters: Sequence[ServedAdapter] = ()
        self.start_seconds: Mapping[str, float] = {}  # WorkerReady.start_seconds

    @property
    def kv_usage(self) -> float:
        """Returns the used share of the KV cache, 0 to 1."""
        return self.load.kv_slots_used / self.load.kv_slots_total if self.load.kv_slots_total else 0.0

    def collect(self) -> Iterable[Family]:
        yield self._gauge(
            "kv_cache_usage_perc", "KV cache usage of running requests; 1 means full.", self.kv_usage
        )
        for declared in declared_metrics(LoadReport):
            yield self._family(declared)
        yield self._start()
        total = sum(adapter.num_bytes for adapter in self.adapters)
        yield self._gauge("lora_adapters", "LoRA adapters that requests may name.", len(self.adapters))
        yield self._gauge("lora_adapter_bytes", "Memory of these adapters.", total)

    def _family(self, declared: Declared) -> Family:
        metric, value = declared.metric, declared.value_in(self.load)
        if metric.kind == "gauge":
            return self._gauge(metric.name, metric.help, value * metric.scale)
        name = f"moeserve:{metric.name}"
        if metric.kind == "counter":
            counter = CounterMetricFamily(name, metric.help, labels=LABELS)
            counter.add_metric(self._labels, value * metric.scale)
            return counter
        histogram = HistogramMetricFamily(name, metric.help, labels=LABELS)
        bounds = [*(f"{bound * metric.scale:g}" for bound in value.bounds), "+Inf"]
        counts = list(zip(bounds, accumulate(value.counts), strict=True))
        histogram.add_metric(self._labels, counts, value.sum * metric.scale)
        return histogram

    def _gauge(self, name: str, text: str, value: float) -> Family:
        gauge = GaugeMetricFamily(f"moeserve:{name}", text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _start(self) -> Family:
        gauge = GaugeMetricFamily(
            "moeserve:worker_start_seconds",
            "Seconds of the last start of a worker on a GPU, by phase: imports, GPU (its context), plan, weights, "
            "buffers, kernels (compiled, or loaded from disk), graphs (capturing CUDA graphs), timing steps, small "
            "model (that drafts), first step.",
            labels=(*LABELS, "phase"),
        )
        for phase, seconds in self.start_seconds.items():
            gauge.add_metric([*self._labels, phase], seconds)
        return gauge
