"""The router's gauges and totals, which it reports to httpserver and `/metrics` shows."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.metric import Family, HistogramCounts, Metric
from moeserve.messages.pages import TierCounts
from moeserve.messages.table_rows import TableRowCounts

STEP_BOUNDS_MS: Final = (
    *(1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000),
)
IDLE_BOUNDS_MS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)

# Drafts of a row: up to MOST_DRAFTS of the configuration (test_accepted_drafts_by_position compares them).
ACCEPTED_BOUNDS: Final = tuple(range(16))


def _steps() -> HistogramCounts:
    return HistogramCounts.empty(STEP_BOUNDS_MS)


class LoadReport(msgspec.Struct, tag=True):
    """The router's gauges and totals since its start. Sent when they change (at most every 50 ms, but at once when the
    last request ends), and at least every second: a router that sends none is stuck.

    The router increases the counters and histograms in its own LoadReport, which scheduler and batch share; a sent
    report never changes. To add a metric, declare it here and increase it where the event happens. A field with several
    declarations is exported under several names."""

    num_running: Annotated[
        int, Metric("gauge", "num_requests_running", "Requests in model execution batches.")
    ] = 0
    num_waiting: Annotated[
        int, Metric("gauge", "num_requests_waiting", "Requests waiting to be processed.")
    ] = 0
    kv_slots_used: Annotated[
        int, Metric("gauge", "kv_cache_slots_used", "KV cache slots (tokens) of running requests.")
    ] = 0
    kv_slots_total: Annotated[
        int, Metric("gauge", "kv_cache_slots_total", "KV cache slots (tokens) in total.")
    ] = 0
    prompt_tokens: Annotated[
        int,
        Metric("counter", "prompt_tokens", "Prefill tokens processed, including cached tokens.", "tokens"),
        Metric("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "tokens"),
    ] = 0
    generation_tokens: Annotated[
        int, Metric("counter", "generation_tokens", "Generation tokens processed.", "tokens")
    ] = 0
    cached_tokens: Annotated[
        int, Metric("counter", "prefix_cache_hits", "Prompt tokens taken from the prefix cache.", "tokens")
    ] = 0
    preemptions: Annotated[
        int, Metric("counter", "num_preemptions", "Requests preempted to free KV cache slots.")
    ] = 0
    aborts: Annotated[
        int, Metric("counter", "num_aborts", "Requests aborted because their client disconnected.")
    ] = 0
    steps: Annotated[int, Metric("counter", "engine_steps", "Worker steps.")] = 0
    kv_slots_cached: Annotated[
        int,
        Metric(
            "gauge",
            "kv_cache_slots_cached",
            "KV cache slots that hold cached prefixes and belong to no running request; they are evicted when room is "
            "needed.",
        ),
    ] = 0
    queued_tokens: Annotated[
        int,
        Metric("gauge", "num_tokens_waiting", "Tokens still to be computed for waiting requests.", "tokens"),
    ] = 0
    repeated_tokens: Annotated[
        int, Metric("counter", "recomputed_tokens", "Tokens recomputed after a preemption.", "tokens")
    ] = 0
    decode_step_ms: Annotated[
        HistogramCounts,
        Metric("histogram", "decode_step_seconds", "Duration of worker steps without prompt tokens.", "ms"),
    ] = msgspec.field(default_factory=_steps)
    prefill_step_ms: Annotated[
        HistogramCounts,
        Metric("histogram", "prefill_step_seconds", "Duration of worker steps with prompt tokens.", "ms"),
    ] = msgspec.field(default_factory=_steps)
    idle_ms: Annotated[
        HistogramCounts,
        Metric(
            "histogram",
            "worker_idle_seconds",
            "Time the worker waits between two steps of the same requests.",
            "ms",
        ),
    ] = msgspec.field(default_factory=lambda: HistogramCounts.empty(IDLE_BOUNDS_MS))
    kernels_compiled: Annotated[
        int,
        Metric(
            "counter",
            "kernels_compiled",
            "GPU kernels compiled, or loaded, while serving, and CUDA graphs that were not captured yet, each of which "
            "delayed a step: 0 where all were before the server is ready; a worker in the place of a lost one catches "
            "up.",
        ),
    ] = 0
    state_slots_total: Annotated[
        int,
        Metric("gauge", "state_slots_total", "Slots of recurrent state in total; 0: the model has none."),
    ] = 0
    state_slots_running: Annotated[
        int, Metric("gauge", "state_slots_running", "Slots of recurrent state of running requests.")
    ] = 0
    state_slots_snapshots: Annotated[
        int,
        Metric(
            "gauge",
            "state_slots_snapshots",
            "Slots of recurrent state that hold snapshots in the prefix cache.",
        ),
    ] = 0
    state_snapshot_hits: Annotated[
        int,
        Metric("counter", "state_snapshot_hits", "Requests that continued from a snapshot of state."),
    ] = 0
    state_snapshot_evictions: Annotated[
        int,
        Metric(
            "counter",
            "state_snapshot_evictions",
            "Snapshots of state evicted for another state; without those evicted with their KV.",
        ),
    ] = 0
    window_slots_total: Annotated[
        int,
        Metric(
            "gauge",
            "kv_window_slots_total",
            "Slots of the windowed layers' KV pool in total; 0: all layers have one pool.",
        ),
    ] = 0
    window_slots_used: Annotated[
        int,
        Metric(
            "gauge",
            "kv_window_slots_used",
            "Slots of the windowed layers' KV pool of running requests.",
        ),
    ] = 0
    window_slots_cached: Annotated[
        int,
        Metric(
            "gauge",
            "kv_window_slots_cached",
            "Slots of the windowed layers' KV pool that the prefix cache alone holds.",
        ),
    ] = 0
    window_hits: Annotated[
        int,
        Metric(
            "counter",
            "kv_window_hits",
            "Requests that continued a cached prefix in the windowed layers' KV pool.",
        ),
    ] = 0
    window_evictions: Annotated[
        int,
        Metric(
            "counter",
            "kv_window_evictions",
            "Window segments of cached prefixes evicted for another request's slots.",
        ),
    ] = 0
    engine_losses: Annotated[
        int,
        Metric(
            "counter",
            "engine_losses",
            "Workers, routers and detokenizers that crashed or hung and were replaced, and lost connections to a "
            "worker on another machine.",
        ),
    ] = 0
    continued: Annotated[
        int, Metric("counter", "requests_continued", "Running requests that went on after such a loss.")
    ] = 0
    disk: Annotated[TierCounts, Family("kv_disk_", "the tier on disk")] = msgspec.field(
        default_factory=TierCounts
    )
    ram: Annotated[TierCounts, Family("kv_ram_", "the tier in RAM")] = msgspec.field(
        default_factory=TierCounts
    )
    drafts: Annotated[
        int, Metric("counter", "spec_decode_num_drafts", "Rows of steps whose last tokens were drafted.")
    ] = 0
    draft_tokens: Annotated[
        int, Metric("counter", "spec_decode_num_draft_tokens", "Tokens drafted.", "tokens")
    ] = 0
    accepted_draft_tokens: Annotated[
        int,
        Metric(
            "counter",
            "spec_decode_num_accepted_tokens",
            "Drafted tokens that were right, and kept.",
            "tokens",
        ),
    ] = 0
    accepted_lengths: Annotated[
        HistogramCounts,
        Metric(
            "histogram",
            "spec_decode_accepted_length",
            "Drafted tokens that were kept, of each row that had some.",
            "tokens",
        ),
    ] = msgspec.field(default_factory=lambda: HistogramCounts.empty(ACCEPTED_BOUNDS))
    beam_searches: Annotated[
        int, Metric("counter", "beam_searches", "Beam searches that ended with their answers.")
    ] = 0
    beam_rows: Annotated[
        int,
        Metric(
            "counter",
            "beam_rows",
            "Tokens computed for beams, those of beams that were given up included.",
            "tokens",
        ),
    ] = 0
    beam_forks: Annotated[
        int,
        Metric("counter", "beam_forks", "Beams that went on in one more way, without a copy of their KV."),
    ] = 0
    beam_restarts: Annotated[
        int,
        Metric("counter", "beam_restarts", "Beam searches that began again after a preemption or a loss."),
    ] = 0
    # Keys of the LoRA adapters that running and waiting requests use: vllm:lora_requests_info.
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    expert_cache: Annotated[ExpertCacheCounts, Family("expert_cache_")] = ExpertCacheCounts()
    expert_disk: Annotated[ExpertDiskCounts, Family("expert_disk_")] = ExpertDiskCounts()
    table_rows: Annotated[TableRowCounts, Family("ngram_rows_")] = TableRowCounts()
