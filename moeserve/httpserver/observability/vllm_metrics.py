"""Our metrics under vLLM's names, for gateways, autoscalers and dashboards that are made for a vLLM server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.httpserver.observability.load_metrics import LABELS, LoadCollector

# Of ours, those that vLLM has under the same name, and its older names for them.
SHARED: Final[dict[str, tuple[str, ...]]] = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "kv_cache_usage_perc": (),
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
}


class VllmCollector(Collector):
    """Yields our metrics, and behind them vLLM's."""

    def __init__(
        self,
        ours: Callable[[], Iterable[Metric]],
        load: LoadCollector,
        model_name: str,
        block_size: int,
        cache_dtype: str,
        max_adapters: int,
    ) -> None:
        """`block_size` in tokens, in which vLLM counts the KV cache. max_adapters: 0 without --lora-dir."""
        self._ours = ours
        self._load = load
        self._model_name = model_name
        self._block_size = block_size
        self._cache_dtype = cache_dtype
        self._max_adapters = max_adapters

    def collect(self) -> Iterable[Metric]:
        ours = list(self._ours())
        yield from ours
        for metric in ours:
            name = metric.name.removeprefix("moeserve:")
            if name in SHARED:
                for theirs in (name, *SHARED[name]):
                    yield _renamed(metric, f"vllm:{theirs}")
        yield self._cache()
        yield self._adapters()

    def _cache(self) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's type (--kv-cache-dtype) as cache_dtype, its size as num_gpu_blocks blocks of block_size "
            "tokens (--kv-events-block-size).",
            labels=(*LABELS, "cache_dtype", "block_size", "num_gpu_blocks"),
        )
        size = self._block_size
        blocks = self._load.load.kv_slots_total // size
        info.add_metric([self._model_name, self._cache_dtype, str(size), str(blocks)], 1)
        return info

    def _adapters(self) -> Metric:
        """What the Gateway API's inference extension reads to prefer a replica that has the adapter. The value is a
        time, as vLLM's is; there is a sample where there can be adapters."""
        names = {adapter.key: adapter.name for adapter in self._load.adapters}
        load, most = self._load.load, self._max_adapters
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of running and of waiting requests, and how many there may be (--max-loras), as labels; the "
            "value is the time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        if most or names:
            running, waiting = (
                ",".join(sorted(names[key] for key in keys if key in names))
                for keys in (load.running_adapters, load.waiting_adapters)
            )
            gauge.add_metric([str(most or len(names)), running, waiting], time.time())
        return gauge


def _renamed(metric: Metric, name: str) -> Metric:
    """The same samples under another name."""
    renamed = Metric(name, f"As {metric.name}.", metric.type)
    renamed.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return renamed
