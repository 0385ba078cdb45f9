"""moeserve's metrics under vLLM's names, for gateways, autoscalers and dashboards made for vLLM servers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.httpserver.observability.load_metrics import LABELS, LoadCollector

# Metrics that vLLM has under the same name, with vLLM's older names for them.
SHARED: Final[dict[str, tuple[str, ...]]] = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
    "prefix_cache_queries": ("gpu_prefix_cache_queries",),
    "prefix_cache_hits": ("gpu_prefix_cache_hits",),
    "num_preemptions": (),
    "prompt_tokens": (),
    "generation_tokens": (),
    "spec_decode_num_drafts": (),
    "spec_decode_num_draft_tokens": (),
    "spec_decode_num_accepted_tokens": (),
    "request_success": (),
    "request_prompt_tokens": (),
    "request_generation_tokens": (),
    "time_to_first_token_seconds": (),
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "request_time_per_output_token_seconds": (),
    "e2e_request_latency_seconds": (),
    "request_queue_time_seconds": (),
    "request_inference_time_seconds": (),
    "request_prefill_time_seconds": (),
    "request_decode_time_seconds": (),
}


def under_vllm_names(exposition: str) -> str:
    """Returns the lines of the SHARED metrics under vLLM's names. The lines are copied, because a second rendering
    would block the event loop for 10 ms."""
    renamed: list[str] = []
    for block in exposition.split("# HELP moeserve:")[1:]:
        name = block.partition(" ")[0].removesuffix("_total")
        if name in SHARED:
            samples = block.partition("\n")[2]
            for theirs in (name, *SHARED[name]):
                total = "_total" if f"moeserve:{name}_total" in samples else ""
                renamed.append(f"# HELP vllm:{theirs}{total} As moeserve:{name}{total}.\n")
                renamed.append(samples.replace(f"moeserve:{name}", f"vllm:{theirs}"))
    return "".join(renamed)


class VllmCollector(Collector):
    """Metrics of vLLM's that have no counterpart under `moeserve:`."""

    def __init__(
        self,
        load: LoadCollector,
        model_name: str,
        block_size: int,
        cache_dtype: str,
        max_adapters: int,
        most_drafts: int,
    ) -> None:
        """block_size: tokens of a block, vLLM's unit for the KV cache. max_adapters: 0 without --lora-dir. most_drafts:
        of a row."""
        self._load = load
        self._model_name = model_name
        self._block_size = block_size
        self._cache_dtype = cache_dtype
        self._max_adapters = max_adapters
        self._most_drafts = most_drafts

    def collect(self) -> Iterable[Metric]:
        yield self._cache()
        yield self._adapters()
        yield self._accepted()

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

    def _accepted(self) -> Metric:
        """Returns how often the draft at each position, from 0, was right with all before it: 0 too, so that a
        dashboard's rates by position begin with the server."""
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were kept, by position in their draft; see moeserve:spec_decode_accepted_length.",
            labels=(*LABELS, "position"),
        )
        counts = self._load.load.accepted_lengths.counts
        for position in range(len(counts) - 1):
            accepted = sum(counts[position + 1 :])
            if accepted or position < self._most_drafts:
                counter.add_metric([self._model_name, str(position)], accepted)
        return counter

    def _adapters(self) -> Metric:
        """Returns the metric by which the Gateway API's inference extension prefers a replica that has the adapter. As
        in vLLM, the value is a time. Without --lora-dir there is no sample."""
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
