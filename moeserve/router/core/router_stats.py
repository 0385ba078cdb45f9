"""The router's counters and histograms, and the LoadReport made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.pages import TierCounts
from moeserve.messages.schema import HistogramCounts, LoadReport
from moeserve.router.core.batch.running_batch import RunningBatch
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.steps.scheduled_step import ScheduledStep

STEP_BUCKETS_MS = (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000)
IDLE_BUCKETS_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)


class Histogram:
    """Counts by inclusive upper bound; the last bucket counts the values above every bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def message(self) -> HistogramCounts:
        return HistogramCounts(bounds=list(self._bounds), counts=self._counts[:], sum=self._sum)


class RouterStats:
    """Running totals since the start. Written by Scheduler and BeamSearches."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.repeated_tokens = 0
        self.aborts = 0
        self.kernels_compiled = 0
        self.expert_cache = ExpertCacheCounts()
        self.engine_losses = 0
        self.continued = 0
        self.beam_searches = 0
        self.beam_rows = 0
        self.beam_forks = 0
        self._decode_ms = Histogram(STEP_BUCKETS_MS)
        self._mixed_ms = Histogram(STEP_BUCKETS_MS)
        self._idle_ms = Histogram(IDLE_BUCKETS_MS)

    def observe_step(self, scheduled: ScheduledStep, compute_ms: float, idle_ms: float) -> None:
        self.steps += 1
        self.prompt_tokens += scheduled.fresh_tokens
        self.repeated_tokens += scheduled.repeated_tokens
        (self._mixed_ms if scheduled.prompt_tokens else self._decode_ms).add(compute_ms)
        if scheduled.continues:
            self._idle_ms.add(idle_ms)

    def report(
        self, batch: RunningBatch, waiting: WaitingQueue, memory: KvMemory, adapters: Counter[str]
    ) -> LoadReport:
        """adapters: how many open requests have each."""
        running = Counter(one.adapter for one in batch.running.values()) if adapters else adapters
        return LoadReport(
            num_running=len(batch.running),
            num_waiting=len(waiting) + len(batch.postponed) + len(batch.loading),
            kv_slots_used=memory.num_held,
            kv_slots_total=memory.num_slots,
            prompt_tokens=self.prompt_tokens + batch.num_cached_tokens,
            generation_tokens=self.generation_tokens,
            cached_tokens=batch.num_cached_tokens,
            preemptions=batch.num_preemptions,
            aborts=self.aborts,
            steps=self.steps,
            kv_slots_cached=memory.num_cached,
            queued_tokens=waiting.num_tokens,
            repeated_tokens=self.repeated_tokens,
            decode_step_ms=self._decode_ms.message(),
            prefill_step_ms=self._mixed_ms.message(),
            idle_ms=self._idle_ms.message(),
            kernels_compiled=self.kernels_compiled,
            state_slots_total=memory.states.num_slots,
            state_slots_running=memory.states.num_running,
            state_slots_snapshots=memory.states.num_snapshots,
            state_snapshot_hits=memory.states.num_hits,
            state_snapshot_evictions=memory.states.num_evictions,
            **_of_windows(memory),
            engine_losses=self.engine_losses,
            continued=self.continued,
            beam_searches=self.beam_searches,
            beam_rows=self.beam_rows,
            beam_forks=self.beam_forks,
            beam_restarts=batch.num_search_restarts,
            expert_cache=self.expert_cache,
            running_adapters=sorted(key for key in adapters if running[key]),
            waiting_adapters=sorted(key for key, count in adapters.items() if count > running[key]),
            disk=TierCounts() if memory.tiers is None else memory.tiers.counts("disk"),
            ram=TierCounts() if memory.tiers is None else memory.tiers.counts("ram"),
        )


def _of_windows(memory: KvMemory) -> dict[str, int]:
    windows = memory.windows
    if windows is None:
        return {}
    return {
        "window_slots_total": windows.num_slots,
        "window_slots_used": windows.num_held,
        "window_slots_cached": windows.num_cached,
        "window_hits": windows.num_hits,
        "window_evictions": windows.num_evictions,
    }
