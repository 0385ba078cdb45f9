"""Builds the message with a loaded engine's limits and properties, for the router; the same on every device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moeserve.config import ServerConfig, drafts_of, num_drafts
from moeserve.config.units import GIB
from moeserve.kv.capacity import KvCapacity
from moeserve.kv.layout import KvLayout
from moeserve.messages.steps import WorkerReady
from moeserve.models.interface import ModelShape
from moeserve.models.next_token import next_token_fault
from moeserve.models.skipped_layers import skipped_layers
from moeserve.models.sources.source import ModelSource
from moeserve.worker.adapters.resident import AdapterAtStart
from moeserve.worker.tiers.page_mover import PageMover

log = logging.getLogger(__name__)


def log_skipped(shape: ModelShape, source: ModelSource, config: ServerConfig) -> None:
    """Logs once which parts of the model are not loaded, and why its next-token block does not draft if it could."""
    drafts = drafts_of(config)
    is_auto = drafts is not None and drafts.block_method == "auto"
    fault = next_token_fault(shape, source) if is_auto and shape.next_token_layer is None else None
    if fault is not None:
        log.warning("no drafts by the model's next-token block (MTP): %s", fault)
    skipped = skipped_layers(shape, source)
    if skipped.count:
        log.info(
            "skipped %d layer%s for the tokens after the next one (MTP): %.2f GiB of the model are not loaded",
            skipped.count,
            "" if skipped.count == 1 else "s",
            skipped.num_bytes / GIB,
        )


def ready_message(
    config: ServerConfig,
    layout: KvLayout,
    capacity: KvCapacity,
    weight_bytes: int,
    device: str,
    step_tokens: int,
    num_state_slots: int,
    pages: PageMover | None = None,
    adapters: Sequence[AdapterAtStart] = (),
    embedding_size: int = 0,
) -> WorkerReady:
    """Returns the ready message. weight_bytes: on all devices together. pages: the tiers behind the KV pool, if any.
    embedding_size: see WorkerReady."""
    return WorkerReady(
        num_kv_slots=capacity.num_slots,
        max_num_seqs=config.max_num_seqs,
        max_model_len=capacity.max_model_len,
        vocab_size=layout.shape.vocab_size,
        weight_bytes=weight_bytes,
        kv_bytes=capacity.kv_bytes(layout),
        device=device,
        max_num_batched_tokens=step_tokens,
        num_experts=layout.shape.num_experts,
        experts_per_token=layout.shape.top_k,
        num_state_slots=num_state_slots,
        kv_slot_kinds=list(capacity.kinds),
        num_window_slots=capacity.num_window_slots,
        window=layout.window if capacity.num_window_slots else 0,
        kv_page_tokens=0 if pages is None else pages.page_tokens,
        kv_page_bytes=0 if pages is None else pages.page_bytes,
        kv_write_bytes=0 if pages is None else pages.write_bytes,
        kv_tiers=[] if pages is None else pages.tiers,
        state_bytes=layout.state_bytes(),
        max_drafts=num_drafts(config),
        adapters={adapter.name: adapter.key for adapter in adapters},
        adapter_bytes={adapter.key: adapter.num_bytes for adapter in adapters},
        embedding_size=embedding_size,
        rotates_in_sections=embedding_size > 0 and layout.shape.rope_sections is not None,
        whole_spans=embedding_size > 0 and layout.shape.spans_see_ahead,
    )
