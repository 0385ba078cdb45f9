"""The Prometheus registry, with vLLM's metric names and meanings under `moeserve:`.

The router's counts arrive as `LoadReport` and are exported unchanged. What only this process sees (when tokens arrive,
how requests end) is observed here. Times are in seconds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from moeserve import __version__
from moeserve.messages.adapters import ServedAdapter
from moeserve.messages.pages import Tier
from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import HistogramCounts, LoadReport, Usage

Status = Literal["loading", "ok", "restarting", "unresponsive", "draining"]

_LABELS: Final = ("model_name",)
_TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS: Final = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS: Final = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

# (field of LoadReport, metric, help)
_GAUGES: Final = (
    ("num_running", "num_requests_running", "Requests in model execution batches."),
    ("num_waiting", "num_requests_waiting", "Requests waiting to be processed."),
    ("queued_tokens", "num_tokens_waiting", "Tokens still to be computed for waiting requests."),
    ("kv_slots_used", "kv_cache_slots_used", "KV cache slots (tokens) in use."),
    (
        "kv_slots_cached",
        "kv_cache_slots_cached",
        "KV cache slots that hold cached prefixes and belong to no running request.",
    ),
    ("kv_slots_total", "kv_cache_slots_total", "KV cache slots (tokens) in total."),
    ("window_slots_used", "kv_window_slots_used", "Slots of the windowed layers' KV pool in use."),
    (
        "window_slots_cached",
        "kv_window_slots_cached",
        "Slots of the windowed layers' KV pool that the prefix cache alone holds.",
    ),
    (
        "window_slots_total",
        "kv_window_slots_total",
        "Slots of the windowed layers' KV pool in total; 0: all layers have one pool.",
    ),
    ("state_slots_running", "state_slots_running", "Slots of recurrent state of running requests."),
    ("state_slots_snapshots", "state_slots_snapshots", "Slots of recurrent state that hold snapshots."),
    ("state_slots_total", "state_slots_total", "Slots of recurrent state in total; 0: the model has none."),
)
_COUNTERS: Final = (
    ("prompt_tokens", "prompt_tokens", "Prefill tokens processed, including cached tokens."),
    ("generation_tokens", "generation_tokens", "Generation tokens processed."),
    ("prompt_tokens", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("cached_tokens", "prefix_cache_hits", "Prompt tokens taken from the prefix cache."),
    ("state_snapshot_hits", "state_snapshot_hits", "Requests that continued from a snapshot of state."),
    ("state_snapshot_evictions", "state_snapshot_evictions", "Snapshots of state evicted for another state."),
    (
        "window_hits",
        "kv_window_hits",
        "Requests that continued from an island of the windowed layers' KV pool.",
    ),
    (
        "window_evictions",
        "kv_window_evictions",
        "Islands of the windowed layers' KV pool evicted for another request.",
    ),
    ("preemptions", "num_preemptions", "Requests preempted to free KV cache slots."),
    ("repeated_tokens", "recomputed_tokens", "Tokens recomputed after a preemption."),
    ("aborts", "num_aborts", "Requests aborted because their client disconnected."),
    ("steps", "engine_steps", "Worker steps."),
    (
        "kernels_compiled",
        "kernels_compiled",
        "GPU kernels compiled while serving, and CUDA graphs that were not captured yet, each of which delayed a "
        "step: all should be before the server is ready; a worker in the place of a lost one catches up.",
    ),
    (
        "engine_losses",
        "engine_losses",
        "Workers, routers and detokenizers that crashed or hung and were replaced.",
    ),
    ("continued", "requests_continued", "Requests that went on after such a loss."),
    ("beam_searches", "beam_searches", "Beam searches that ended with their answers."),
    ("beam_rows", "beam_rows", "Tokens computed for beams, those of beams that were given up included."),
    ("beam_forks", "beam_forks", "Beams that went on in one more way, without a copy of their KV."),
    ("beam_restarts", "beam_restarts", "Beam searches that began again after a preemption or a loss."),
)
# Of the expert cache, after expert_cache_.
_EXPERT_CACHE_COUNTERS: Final = (
    ("hits", "Experts that a step used and found in GPU memory; a step counts each expert of a layer once."),
    ("misses", "Experts that a step used and the CPU computed."),
    ("promotions", "Experts brought to GPU memory as the text used them."),
    ("bytes", "Bytes of weights brought to GPU memory by the expert cache."),
)
# Of the prefix cache's tiers, after kv_ram_ and kv_disk_; {} is where they are.
_TIER_COUNTERS: Final = (
    ("tokens", "tokens", "Prompt tokens whose KV was read from {}."),
    ("bytes_written", "written_bytes", "Bytes of KV written to {}."),
    ("bytes_read", "read_bytes", "Bytes of KV read from {}."),
    ("declined", "declined", "Prompts in {} that were recomputed because that was expected to be faster."),
    ("failed_pages", "failed_pages", "Pages in {} that were corrupt, truncated or unreadable."),
)
_TIERS: Final[tuple[tuple[Tier, str], ...]] = (("ram", "the tier in RAM"), ("disk", "the tier on disk"))
# The router's histograms, which it keeps in milliseconds.
_HISTOGRAMS: Final = (
    ("decode_step_ms", "decode_step_seconds", "Duration of worker steps without prompt tokens."),
    ("prefill_step_ms", "prefill_step_seconds", "Duration of worker steps with prompt tokens."),
    ("idle_ms", "worker_idle_seconds", "Time the worker waits between two steps of the same requests."),
)


class _RouterCollector(Collector):
    """Exports the newest LoadReport. The totals start at 0 with the server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        load, labels = self._metrics.load, [self._metrics.model_name]
        for name, metric, text in _GAUGES:
            gauge = GaugeMetricFamily(f"moeserve:{metric}", text, labels=_LABELS)
            gauge.add_metric(labels, getattr(load, name))
            yield gauge
        usage = GaugeMetricFamily(
            "moeserve:kv_cache_usage_perc", "KV cache usage; 1 means full.", labels=_LABELS
        )
        used = load.kv_slots_used / load.kv_slots_total if load.kv_slots_total else 0.0
        usage.add_metric(labels, used)
        yield usage
        yield from self._vllm(used)
        for name, metric, text in _COUNTERS:
            counter = CounterMetricFamily(f"moeserve:{metric}", text, labels=_LABELS)
            counter.add_metric(labels, getattr(load, name))
            yield counter
        yield self._start()
        yield from self._adapters()
        yield from self._tiers()
        yield from self._expert_cache()
        for name, metric, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"moeserve:{metric}", text, labels=_LABELS)
            counts: HistogramCounts = getattr(load, name)
            bounds = [*(f"{bound / 1e3:g}" for bound in counts.bounds), "+Inf"]
            sums = accumulate(counts.counts or [0])
            histogram.add_metric(labels, list(zip(bounds, sums, strict=True)), counts.sum / 1e3)
            yield histogram

    def _start(self) -> Metric:
        gauge = GaugeMetricFamily(
            "moeserve:worker_start_seconds",
            "Seconds of the last start of a worker on a GPU, by phase.",
            labels=(*_LABELS, "phase"),
        )
        for phase, seconds in self._metrics.start_seconds.items():
            gauge.add_metric([self._metrics.model_name, phase], seconds)
        return gauge

    def _adapters(self) -> Iterable[Metric]:
        adapters, labels = self._metrics.adapters, [self._metrics.model_name]
        for metric, text, value in (
            ("lora_adapters", "LoRA adapters that requests may name.", len(adapters)),
            (
                "lora_adapter_bytes",
                "Memory of these adapters.",
                sum(adapter.num_bytes for adapter in adapters),
            ),
        ):
            gauge = GaugeMetricFamily(f"moeserve:{metric}", text, labels=_LABELS)
            gauge.add_metric(labels, value)
            yield gauge

    def _tiers(self) -> Iterable[Metric]:
        load, labels = self._metrics.load, [self._metrics.model_name]
        for tier, place in _TIERS:
            of = load.ram if tier == "ram" else load.disk
            pages = GaugeMetricFamily(
                f"moeserve:kv_{tier}_pages", f"Pages of KV and states in {place}.", labels=_LABELS
            )
            pages.add_metric(labels, of.pages)
            yield pages
            counts = [
                (metric, text.format(place), float(getattr(of, name)))
                for name, metric, text in _TIER_COUNTERS
            ]
            counts.append(
                ("load_seconds", f"Time in which KV was being read from {place}.", of.load_ms / 1e3)
            )
            for metric, text, value in counts:
                counter = CounterMetricFamily(f"moeserve:kv_{tier}_{metric}", text, labels=_LABELS)
                counter.add_metric(labels, value)
                yield counter

    def _expert_cache(self) -> Iterable[Metric]:
        counts, labels = self._metrics.load.expert_cache, [self._metrics.model_name]
        for name, text in _EXPERT_CACHE_COUNTERS:
            counter = CounterMetricFamily(f"moeserve:expert_cache_{name}", text, labels=_LABELS)
            counter.add_metric(labels, getattr(counts, name))
            yield counter

    def _vllm(self, used: float) -> Iterable[Metric]:
        """What routers read of a vLLM server to choose a replica, under its names."""
        load, labels = self._metrics.load, [self._metrics.model_name]
        for name, text, value in (
            ("num_requests_running", "As moeserve:num_requests_running.", load.num_running),
            ("num_requests_waiting", "As moeserve:num_requests_waiting.", load.num_waiting),
            ("kv_cache_usage_perc", "As moeserve:kv_cache_usage_perc.", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "As moeserve:prefix_cache_queries.", load.prompt_tokens),
            ("prefix_cache_hits", "As moeserve:prefix_cache_hits.", load.cached_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric(labels, value)
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's type and size.",
            labels=(*_LABELS, "cache_dtype", "block_size", "num_gpu_blocks"),
        )
        size = self._metrics.block_size
        blocks = load.kv_slots_total // size
        info.add_metric([*labels, self._metrics.cache_dtype, str(size), str(blocks)], 1)
        yield info
        yield from self._vllm_adapters()

    def _vllm_adapters(self) -> Iterable[Metric]:
        """What the Gateway API's inference extension reads to prefer a replica that has the adapter. The value is a
        time, as vLLM's is; there is a sample where there can be adapters."""
        names = {adapter.key: adapter.name for adapter in self._metrics.adapters}
        load, most = self._metrics.load, self._metrics.max_adapters
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of running and of waiting requests, and how many there may be.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        if most or names:
            running, waiting = (
                ",".join(sorted(names[key] for key in keys if key in names))
                for keys in (load.running_adapters, load.waiting_adapters)
            )
            gauge.add_metric([str(most or len(names)), running, waiting], time.time())
        yield gauge


class Metrics:
    """The registry and its metrics. `EngineClient` writes `load`; the rest is written through the methods, on the event
    loop's thread."""

    def __init__(
        self, model_name: str, block_size: int = 1, cache_dtype: str = "auto", max_adapters: int = 0
    ) -> None:
        """`block_size` in tokens, in which vLLM's metrics count the KV cache; cache_dtype: --kv-cache-dtype.
        max_adapters: with --lora-dir, as many as there may be."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model_name = model_name
        self.block_size = block_size
        self.cache_dtype = cache_dtype
        self.max_adapters = max_adapters
        self.adapters: Sequence[ServedAdapter] = ()  # written by `EngineClient`
        self.start_seconds: Mapping[str, float] = {}  # WorkerReady.start_seconds, by `EngineClient`
        self.load = LoadReport(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_RouterCollector(self))
        ProcessCollector(registry=self.registry)
        build = Info("moeserve:build", "Which moeserve this is.", registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens.", _ITL_BUCKETS)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the last token.", _LATENCY_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time a request waits before its prefill.", _LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time of a request's prefill.", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Time of a request's decode.", _LATENCY_BUCKETS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self._output = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKEN_BUCKETS
        )
        ended = Counter(
            "moeserve:request_success",
            "Finished requests by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._answers = Counter(
            "moeserve:http_requests",
            "Answered HTTP requests by route and status.",
            (*_LABELS, "method", "handler", "status"),
            registry=self.registry,
        )
        self._unknown_fields = Counter(
            "moeserve:unknown_request_fields",
            "Unknown fields of requests that were ignored, by route.",
            (*_LABELS, "handler"),
            registry=self.registry,
        )
        now = Gauge(
            "moeserve:server_status",
            "1 for the status that /health reports, 0 for the others.",
            (*_LABELS, "status"),
            registry=self.registry,
        )
        self._status = {status: now.labels(model_name, status) for status in get_args(Status)}
        self._ended = {reason: ended.labels(model_name, reason) for reason in get_args(FinishReason)}

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"moeserve:{name}", text, _LABELS, buckets=tuple(buckets), registry=self.registry)
        return metric.labels(self.model_name)

    def tokens(self, count: int, now: float, arrival: float, last: float | None) -> None:
        """Observes `count` tokens of one generation that came at `now`; its previous token came at `last`. Tokens that
        come together share the gap evenly, which keeps the histogram's mean and makes its count the number of gaps."""
        if last is None:
            self._ttft.observe(now - arrival)
            count -= 1
            last = now
        for _ in range(count):
            self._itl.observe((now - last) / count)

    def answered(self, method: str, handler: str, status: int) -> None:
        """Counts an HTTP request that has ended. `handler` is a route, never a path that a client chose."""
        self._answers.labels(self.model_name, method, handler, str(status)).inc()

    def unknown_fields(self, handler: str, count: int) -> None:
        """Counts the fields of one request that were ignored. `handler` is a route."""
        self._unknown_fields.labels(self.model_name, handler).inc(count)

    def finished(
        self, reason: FinishReason, usage: Usage | None = None, latency: float | None = None
    ) -> None:
        """Counts a generation that has ended. `usage` and `latency` (seconds) are given for those that ran to their
        end."""
        self._ended[reason].inc()
        if usage is None or latency is None:
            return
        self._e2e.observe(latency)
        self._queue.observe(usage.queue_ms / 1e3)
        self._prefill.observe(usage.prefill_ms / 1e3)
        self._decode.observe(usage.decode_ms / 1e3)
        self._prompt.observe(usage.prompt_tokens)
        self._output.observe(usage.completion_tokens)

    def render(self, status: Status = "loading") -> tuple[bytes, str]:
        """Returns the exposition text and its content type. `status` is the server's current status."""
        for name, gauge in self._status.items():
            gauge.set(name == status)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
