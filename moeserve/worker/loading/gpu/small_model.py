"""Loads the small model that drafts (--speculative-model) to the GPU of the model that it drafts for."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moeserve.config import ServerConfig
from moeserve.kv.cache import KvCache
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.gpu_weights import GpuWeights
from moeserve.models.loading.progress import OnProgress
from moeserve.models.step_buffers import step_sizes
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.small_model import GpuSmallModel
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.loading.draft_model import DraftModel, small_step_tokens
from moeserve.worker.loading.start import Start


def load_small_model(small: DraftModel, device: torch.device, on_progress: OnProgress) -> GpuWeights:
    """Reads all weights. Raises torch.OutOfMemoryError."""
    experts = [range(0 if layer.moe is None else layer.moe.num_experts) for layer in small.shape.layers]
    return GpuLoader(small.source, small.shape, device, on_progress).load(experts)


def build_small_drafter(
    config: ServerConfig,
    small: DraftModel,
    weights: GpuWeights,
    slot_table: Tensor,
    on_progress: OnProgress,
    start: Start,
    *,
    target: GpuEngine,
    vocab_size: int,
    max_tokens: int,
    num_kv_slots: int,
) -> partial[ModelDrafter]:
    """Allocates KV cache and buffers, compiles kernels and captures CUDA graphs; a worker that replaces a lost one
    compiles and captures later, between steps, with what `target` has put off. Returns a function that makes the
    drafter from the runner's record of requests and a `Reading`. slot_table: the large model's, int32 [requests + 1,
    length]; a position has the same KV slot in both caches. target, vocab_size, max_tokens: the large model's engine,
    its vocabulary and rows of a step. num_kv_slots: of the pool."""
    rows = small_step_tokens(config, max_tokens)
    kv = KvCache(
        *(small.layout, num_kv_slots, range(small.shape.num_layers), slot_table.device),
        zeroed=True,
        step_rows=step_sizes(rows)[-1],
    ).layers
    decoder = GpuDecoder(small.shape, weights, kv, slot_table, rows, slot_table.shape[1])
    engine = GpuEngine(decoder, SlotTables(slot_table), config.max_num_seqs, "drafts")
    if start.is_first:
        engine.warm_up.compile(on_progress)
        engine.warm_up.capture(on_progress)
    else:
        engine.warm_up.put_off()
        target.warm_up.go_on_with(engine.warm_up)
    start.clock.ended("small model")
    return partial(
        ModelDrafter,
        model=GpuSmallModel(decoder, engine),
        vocab_size=vocab_size,
        most_rows=rows,
        num_kv_slots=num_kv_slots,
        foretell=None,
    )
