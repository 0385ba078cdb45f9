"""The tiles of queries that prefill attention processes, per attention form of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.kernels.attention.op import prefill_tiles, tile_tokens
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.sequences import Int32s

# Prompt steps of up to this many rows have CUDA graphs; for larger ones the GPU takes longer than the host's launches.
GRAPH_PROMPT_ROWS = 1024
GRAPH_PROMPTS = 64  # extra tiles for prompts that end within a tile


def most_tiles(shape: ModelShape, size: int) -> int:
    """Returns the tiles that a CUDA graph for prompt steps of this size has room for; 0: such steps have no graph."""
    if not SMALL_BATCH_ROWS < size <= GRAPH_PROMPT_ROWS:
        return 0
    return size // tile_rows(shape) + GRAPH_PROMPTS


def tile_rows(shape: ModelShape) -> int:
    """Returns the tokens per tile of a model with a single attention form."""
    h = shape.heads
    return tile_tokens(h.num_heads, h.num_kv_heads, h.head_dim)


def tiles_of(
    forms: Sequence[AttentionForm], offset: Int32s, count: Int32s, start: Int32s, req_slot: Int32s
) -> list[Int32s]:
    """Returns int32 [tiles, 4] for each form. offset, count, start, req_slot: int32 [chunks]."""
    return [
        prefill_tiles(offset, count, start, req_slot, form.num_heads, form.num_kv_heads, form.head_dim)
        for form in forms
    ]


def tiles_on(device: torch.device, tiles: list[Int32s]) -> tuple[Tensor, ...]:
    """Launches the copy of each form's tiles, int32 [tiles, 4], to the device. Returns the copies."""
    return tuple(pinned_copy(of_form, device) for of_form in tiles)
