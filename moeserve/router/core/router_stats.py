"""Updates the totals after each step, and builds the LoadReport from them and the current state.

`messages/router_metrics.py` declares every counter. Counters of requests are raised by the code that handles the event,
not here.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.steps import StepResult
from moeserve.router.core.batch.running_batch import RunningBatch
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.steps.scheduled_step import ScheduledStep

# A report is sent in this form, so it survives it. `deepcopy` takes twelve times as long (66 us).
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LoadReport)


def observe_step(totals: LoadReport, scheduled: ScheduledStep, result: StepResult) -> None:
    totals.steps += 1
    totals.kernels_compiled += result.kernels_compiled
    if result.expert_cache is not None:
        totals.expert_cache = totals.expert_cache.plus(result.expert_cache)
    if result.expert_disk is not None:
        totals.expert_disk = totals.expert_disk.plus(result.expert_disk)
    if result.table_rows is not None:
        totals.table_rows = totals.table_rows.plus(result.table_rows)
    totals.prompt_tokens += scheduled.fresh_tokens
    totals.repeated_tokens += scheduled.repeated_tokens
    (totals.prefill_step_ms if scheduled.prompt_tokens else totals.decode_step_ms).add(result.compute_ms)
    if scheduled.continues:
        totals.idle_ms.add(result.idle_ms)
    for entry in result.sampled[: scheduled.num_draft_rows]:
        if entry.accepted is not None:
            totals.drafts += 1
            totals.draft_tokens += entry.accepted.drafted
            totals.accepted_draft_tokens += len(entry.accepted.token_ids)
            totals.accepted_lengths.add(len(entry.accepted.token_ids))


def load_report(
    totals: LoadReport,
    batch: RunningBatch,
    waiting: WaitingQueue,
    memory: SequenceMemory,
    adapters: Counter[str],
) -> LoadReport:
    """Returns a copy of the totals with the gauges filled in. adapters: number of open requests per adapter."""
    running = Counter(one.adapter for one in batch.running.values()) if adapters else adapters
    report = replace(
        _DECODER.decode(_ENCODER.encode(totals)),
        num_running=len(batch.running),
        num_waiting=len(waiting) + len(batch.postponed) + len(batch.loading),
        queued_tokens=waiting.num_tokens,
        running_adapters=sorted(key for key in adapters if running[key]),
        waiting_adapters=sorted(key for key, count in adapters.items() if count > running[key]),
    )
    memory.set_gauges(report)
    return report
