"""`python -m moeserve.router`: the scheduling process, which owns every request's state and every KV slot."""

from __future__ import annotations

import logging
import time

from moeserve.config import ServerConfig
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.schema import EngineReady, HeartbeatRequest, RouterStarted, Shutdown, ToRouter
from moeserve.messages.steps import WorkerReady
from moeserve.messages.worker import WorkerClient, WorkerDied
from moeserve.models.adapters.modules import DEFAULT_MOST, parse_modules
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.lifecycle import Process, run_process
from moeserve.processes.tower_page import TowerPage
from moeserve.router.adapter_registry import AdapterRegistry
from moeserve.router.core.limits import (
    BESIDE_ANSWERS,
    DEFAULT_PREFILL_SHARE,
    PROMPTS_FIRST,
    STREAMED_PREFILL_SHARE,
    Limits,
)
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing, snapshot_spacing, window_spacing
from moeserve.router.core.scheduler import Scheduler
from moeserve.router.embedding_links import EmbeddingLinks
from moeserve.router.kv_event_publisher import KvEventPublisher
from moeserve.router.manager import RouterManager
from moeserve.router.replacement import LaunchedWorkers, LinkedWorkers
from moeserve.router.request_tracer import RequestTracer

log = logging.getLogger(__name__)

CONNECT_INTERVAL_S = 0.05
FLOAT32_BYTES = 4


def limits(config: ServerConfig, ready: WorkerReady) -> Limits:
    """Returns the scheduler's limits, from the configuration and the worker's sizes."""
    beside_answers = ready.max_num_batched_tokens
    if config.max_num_batched_tokens is None:
        beside_answers = min(beside_answers, BESIDE_ANSWERS)
    return Limits(
        num_kv_slots=ready.num_kv_slots,
        max_num_seqs=ready.max_num_seqs,
        max_model_len=ready.max_model_len,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_itl_ms=config.max_itl_ms,
        prefill_share=_prefill_share(config, ready),
        streams_prompts=ready.streams_prompts,
        reuse_prefixes=config.prefix_cache != "off",
        isolate_tenants=config.prefix_cache == "per-key",
        num_experts=ready.num_experts,
        max_drafts=ready.max_drafts,
        experts_per_token=ready.experts_per_token,
        num_state_slots=ready.num_state_slots,
        page_tokens=ready.kv_page_tokens,
        page_bytes=ready.kv_page_bytes,
        page_write_bytes=ready.kv_write_bytes,
        tiers=tuple(ready.kv_tiers),
        state_bytes=ready.state_bytes,
        slot_kinds=tuple(ready.kv_slot_kinds),
        num_window_slots=ready.num_window_slots,
        window=ready.window,
        snapshot_spacing=_spacing(ready, beside_answers),
        event_block_size=None if config.kv_events_endpoint is None else config.kv_events_block_size,
        # A worker on another machine cannot read the embedding files.
        embedding_bytes=0 if config.worker is not None else FLOAT32_BYTES * ready.embedding_size,
        rotates_in_sections=ready.rotates_in_sections,
        whole_spans=ready.whole_spans,
        most_beside_answers=beside_answers,
    )


def _spacing(ready: WorkerReady, step_tokens: int) -> SnapshotSpacing:
    if ready.num_window_slots:
        return window_spacing(ready.window)
    return snapshot_spacing(step_tokens)


def _prefill_share(config: ServerConfig, ready: WorkerReady) -> float:
    if config.prefill_share is not None:
        return config.prefill_share
    if ready.prompts_first:
        return PROMPTS_FIRST
    return STREAMED_PREFILL_SHARE if ready.streams_prompts else DEFAULT_PREFILL_SHARE


def connect(
    workers: LaunchedWorkers, inbox: PullChannel[ToRouter], process: Process
) -> tuple[WorkerClient | None, list[ToRouter]]:
    """Waits until a worker has loaded its model, and connects to it. Returns the worker, or None if the server stops
    first, and the messages that arrived meanwhile: a restarted router receives requests at once."""
    early: list[ToRouter] = []
    while True:
        worker = workers.connect()
        if worker is not None:
            try:
                worker.ready()
                return worker, early
            except WorkerDied as error:
                worker.close()
                workers.replace(worker.pid, str(error))
        process.launcher.look(is_needed=False)
        message = inbox.recv(CONNECT_INTERVAL_S)
        if isinstance(message, Shutdown):
            return None, early
        if isinstance(message, HeartbeatRequest):
            process.heartbeat()
        elif message is not None:
            early.append(message)


def main(process: Process) -> None:
    inbox: PullChannel[ToRouter] = PullChannel(process.context, process.paths.router, codec.TO_ROUTER)
    detokenizer = PushChannel(process.context, process.paths.detokenizer)
    http = PushChannel(process.context, process.paths.http)
    launcher = PushChannel(process.context, process.paths.launcher)
    kv_events = KvEventPublisher.wanted(process.context, process.config)
    detokenizer.send(RouterStarted())
    try:
        serve(process, inbox, detokenizer, http, launcher, kv_events)
    finally:
        if kv_events is not None:
            kv_events.close()
    for channel in (inbox, detokenizer, http, launcher):
        channel.close()


def serve(
    process: Process,
    inbox: PullChannel[ToRouter],
    detokenizer: PushChannel,
    http: PushChannel,
    launcher: PushChannel,
    kv_events: KvEventPublisher | None,
) -> None:
    """Waits for the worker, then runs the manager until the server stops."""
    source = LaunchedWorkers if process.config.worker is None else LinkedWorkers
    workers = source(process.paths.worker, launcher)
    worker, early = connect(workers, inbox, process)
    if worker is not None:
        ready = worker.ready()
        log.info(
            "the worker has %d KV slots, %d window slots, %d request slots, %d state slots",
            *(ready.num_kv_slots, ready.num_window_slots, ready.max_num_seqs, ready.num_state_slots),
        )
        adapters = AdapterRegistry(
            ready,
            parse_modules(process.config.lora_modules),
            None if process.config.lora_dir is None else process.paths.adapters_file,
            process.config.max_loras or DEFAULT_MOST,
            time.monotonic(),
        )
        http.send(EngineReady(ready=ready, adapters=adapters.served))
        process.ready()
        most = limits(process.config, ready)
        scheduler = Scheduler(most)
        scheduler.learn(ready.measured_steps)
        request_tracer = RequestTracer.wanted(process.tracer)
        manager = RouterManager(
            scheduler,
            worker,
            inbox,
            detokenizer,
            http,
            workers,
            request_tracer,
            kv_events,
            step_timeout=process.config.step_timeout,
            continue_requests=process.config.on_engine_loss == "continue",
            adapters=adapters,
            heartbeat=process.heartbeat,
            launcher=process.launcher,
            spans=EmbeddingLinks(EmbeddingFiles(process.paths.spans), most.embedding_bytes)
            if most.embedding_bytes
            else None,
            tower=None if process.config.mmproj is None else TowerPage(process.paths.tower_page),
        )
        manager.run(early)


if __name__ == "__main__":
    run_process("router", main)
