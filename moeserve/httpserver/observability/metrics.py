"""The Prometheus registry, with vLLM's metric names and meanings under `moeserve:`.

The router's counts arrive as `LoadReport` (`load_metrics.py`). This process observes the events that only it sees:
tokens arrive, requests end. Times are in seconds.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
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
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from moeserve import __version__
from moeserve.httpserver.observability.kept_counters import KeptCounters
from moeserve.httpserver.observability.load_metrics import LABELS, LoadCollector
from moeserve.httpserver.observability.load_totals import LoadTotals
from moeserve.httpserver.observability.vllm_metrics import VllmCollector, under_vllm_names
from moeserve.messages.pictures import PictureEncoded
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import Usage

Status = Literal["loading", "ok", "restarting", "unresponsive", "draining"]

# In the runtime directory.
TOTALS_FILE: Final = "load-totals.json"
COUNTERS_FILE: Final = "http-counters.json"

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


class Metrics:
    """The metrics of one server. `EngineClient` writes `reported`; the methods write the rest, on the event loop's
    thread."""

    def __init__(
        self,
        model_name: str,
        block_size: int = 1,
        cache_dtype: str = "auto",
        max_adapters: int = 0,
        directory: Path | None = None,
        *,
        most_drafts: int = 0,
    ) -> None:
        """block_size: tokens of a block, vLLM's unit for the KV cache. cache_dtype: --kv-cache-dtype. max_adapters: the
        most adapters at once with --lora-dir, else 0. directory: files in it keep the counters for the httpserver
        after this one; None: they are not kept. most_drafts: of a row."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model_name = model_name
        self.totals = LoadTotals(None if directory is None else directory / TOTALS_FILE)
        self.reported = LoadCollector(model_name)
        self.reported.load = self.totals.newest
        self._registry = CollectorRegistry(auto_describe=False)  # of what this process counts
        self._kept = KeptCounters(self._registry, None if directory is None else directory / COUNTERS_FILE)
        self._shown = CollectorRegistry(auto_describe=False)
        self._shown.register(self.reported)
        self._shown.register(
            VllmCollector(self.reported, model_name, block_size, cache_dtype, max_adapters, most_drafts)
        )
        ProcessCollector(registry=self._shown)
        self._shown.register(self._kept)
        build = Info(
            "moeserve:build",
            "1, with the version of moeserve and of Python.",
            registry=self._registry,
        )
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
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time of a request's prefill and decode.", _LATENCY_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time between two tokens.",
            _ITL_BUCKETS,
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self._output = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKEN_BUCKETS
        )
        ended = Counter(
            "moeserve:request_success",
            "Generations that ended, by finished_reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._answers = Counter(
            "moeserve:http_requests",
            "HTTP requests answered, by method, handler (route) and status.",
            (*LABELS, "method", "handler", "status"),
            registry=self._registry,
        )
        refused = Counter(
            "moeserve:request_refusals",
            f"HTTP requests refused, by reason: {', '.join(Refusal)}.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._refused = {reason: refused.labels(model_name, reason) for reason in Refusal}
        self._unknown_fields = Counter(
            "moeserve:unknown_request_fields",
            "Fields of requests that were ignored, by handler (route): not known, or without effect and unreadable.",
            (*LABELS, "handler"),
            registry=self._registry,
        )
        self._pictures = self._counter("pictures", "Pictures that were encoded, or found in the cache.")
        self._cached_pictures = self._counter("picture_cache_hits", "Pictures that were found in the cache.")
        self._picture_seconds = self._counter("picture_seconds", "Time to decode and encode pictures.")
        batch_requests = Counter(
            "moeserve:batch_requests",
            "Requests of batches that were answered, by outcome: succeeded or errored.",
            (*LABELS, "outcome"),
            registry=self._registry,
        )
        outcomes = ("succeeded", "errored")
        self._batch_requests = {one: batch_requests.labels(model_name, one) for one in outcomes}
        self._batch_requests_left = Gauge(
            "moeserve:batch_requests_left",
            "Requests of batches that are not answered yet.",
            LABELS,
            registry=self._registry,
        ).labels(model_name)
        now = Gauge(
            "moeserve:server_status",
            "1 for the status that /health reports, 0 for the others.",
            (*LABELS, "status"),
            registry=self._registry,
        )
        self._status = {status: now.labels(model_name, status) for status in get_args(Status)}
        self._ended = {reason: ended.labels(model_name, reason) for reason in get_args(FinishReason)}

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"moeserve:{name}", text, LABELS, buckets=tuple(buckets), registry=self._registry)
        return metric.labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"moeserve:{name}", text, LABELS, registry=self._registry)
        return metric.labels(self.model_name)

    def picture(self, found: PictureEncoded) -> None:
        self._pictures.inc()
        self._cached_pictures.inc(found.is_cached)
        self._picture_seconds.inc(found.seconds)

    def batch_request(self, outcome: str) -> None:
        self._batch_requests[outcome].inc()

    def batch_requests_left(self, count: int) -> None:
        self._batch_requests_left.set(count)

    def tokens(self, count: int, now: float, arrival: float, last: float | None) -> None:
        """Observes `count` tokens of one generation that came together at `now`; the generation's previous token came
        at `last`. Each token is observed with an equal share of the gap, so the histogram has the right mean and counts
        one gap per token."""
        if last is None:
            self._ttft.observe(now - arrival)
            count -= 1
            last = now
        for _ in range(count):
            self._itl.observe((now - last) / count)

    def answered(self, method: str, handler: str, status: int) -> None:
        """Counts an HTTP request that has ended. `handler` is a route, never a path from a client."""
        self._answers.labels(self.model_name, method, handler, str(status)).inc()

    def refused(self, reason: Refusal) -> None:
        self._refused[reason].inc()

    def unknown_fields(self, handler: str, count: int) -> None:
        """Counts the fields of one request that were ignored. `handler` is a route."""
        self._unknown_fields.labels(self.model_name, handler).inc(count)

    def finished(
        self, reason: FinishReason, usage: Usage | None = None, latency: float | None = None
    ) -> None:
        """Counts a generation that has ended. `usage` and `latency` (seconds) are given if it ran to its end."""
        self._ended[reason].inc()
        if usage is None or latency is None:
            return
        self._e2e.observe(latency)
        self._queue.observe(usage.queue_ms / 1e3)
        self._prefill.observe(usage.prefill_ms / 1e3)
        self._decode.observe(usage.decode_ms / 1e3)
        self._inference.observe((usage.prefill_ms + usage.decode_ms) / 1e3)
        if usage.completion_tokens > 1:
            self._per_token.observe(usage.decode_ms / 1e3 / (usage.completion_tokens - 1))
        self._prompt.observe(usage.prompt_tokens)
        self._output.observe(usage.completion_tokens)

    def keep(self) -> None:
        """Writes the counters to their files. Each rendering does so too."""
        self.totals.keep()
        self._kept.keep()

    def render(self, status: Status = "loading") -> tuple[bytes, str]:
        """Returns the exposition text and its content type. `status` is the server's current status."""
        for name, gauge in self._status.items():
            gauge.set(name == status)
        self.totals.keep()
        ours = generate_latest(self._shown)
        return ours + under_vllm_names(ours.decode()).encode(), CONTENT_TYPE_LATEST
