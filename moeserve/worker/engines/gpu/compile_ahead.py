"""The launches of every kind of step, so that their kernels are compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from moeserve.kernels.embed.op import take_sampled
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.sampler import GpuSampler
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs


def launch_every_kind(
    model: GpuDecoder,
    sizes: Sequence[int],
    inputs: Mapping[int, StepInputs],
    sampler: GpuSampler,
    scopes: Sequence[AdapterScope],
    tiles: tuple[Tensor, ...],
) -> None:
    """Of steps of these sizes. Within `compile_ahead`: nothing runs. inputs: by size. tiles: some prompt's, for each of
    the model's forms."""
    for size in sizes:
        take_sampled(inputs[size].token_ids, sampler.tokens)
        for batch in _kinds_of_batches(model, inputs[size], size, scopes, tiles):
            model.begin(batch)
            model.forward(batch)
            for head_size in model.head_sizes:
                if head_size <= size and model.has_head:
                    rows, _, count = inputs[size].head(0, head_size)
                    model.logits(size, rows, count)
    for size in [size for size in model.head_sizes if size in sizes] if model.has_head else ():
        rows, slots, count = inputs[size].head(0, size)
        sampler.launch_every_kind(model.logits(size, rows, count), slots, count)


def _kinds_of_batches(
    model: GpuDecoder,
    inputs: StepInputs,
    size: int,
    scopes: Sequence[AdapterScope],
    tiles: tuple[Tensor, ...],
) -> Iterator[GpuBatch]:
    """Of steps of this size: rows that attend each by itself, and prompts beside them, in every way that experts in RAM
    can take."""
    inputs.fill_dummy(size, model.shape.vocab_size)
    for scope in scopes:
        for independent in (True, False):
            yield inputs.batch(size, None, 0.0, rows_independent=independent, scope=scope)
        if size > SMALL_BATCH_ROWS:
            for streamed in (0.0, 0.5, 1.0) if model.can_stream else (0.0,):
                yield replace(inputs.batch(0, tiles, streamed, scope=scope), num_decode=1)
