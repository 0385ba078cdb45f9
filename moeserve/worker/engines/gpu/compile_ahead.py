"""Launches every kind of step once, so that its kernels are compiled before the first request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moeserve.kernels.embed.op import take_sampled
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.worker.engines.gpu.drafted_choice import DraftedChoice
from moeserve.worker.engines.gpu.sampler import GpuSampler
from moeserve.worker.engines.gpu.steps.micro_batches import TilesOf
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepFacts, kernel_paths


class KernelLaunches:
    """The kernel launches that one engine's steps can need."""

    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        sampler: GpuSampler,
        tiles_of: TilesOf,
        facts: StepFacts,
        drafted: DraftedChoice,
    ) -> None:
        """inputs: by step size. tiles_of: tiles of prompt chunks, see `GpuEngine`."""
        self._model, self._inputs, self._sampler = model, inputs, sampler
        self._tiles_of, self._facts, self._drafted = tiles_of, facts, drafted

    def launch_all(self, sizes: Sequence[int]) -> None:
        """Launches all kernels of steps of these sizes. Must be called inside `compile_ahead`, where launches only
        compile and nothing is executed."""
        one = np.ones(1, np.int32)
        tiles = tiles_on(self._model.device, self._tiles_of(one, one, one, one))
        for size in sizes:
            take_sampled(self._inputs[size].token_ids, self._sampler.tokens)
            self._inputs[size].fill_dummy(size, self._model.shape.vocab_size)
            for path in kernel_paths(size, self._facts):
                batch = self._inputs[size].batch(path, tiles if path.has_tiles else None)
                # The dummy prompt goes through prefill attention; beside it, one row uses decode attention.
                batch = replace(batch, num_decode=1) if path.has_tiles else batch
                self._model.begin(batch)
                self._model.forward(batch)
                self._launch_heads(size)
        self._launch_sampling(sizes)
        self._drafted.launch_all_kernels()

    def _launch_heads(self, size: int) -> None:
        for head_size in self._model.head_sizes:
            if head_size <= size and self._model.has_head:
                rows, _, count = self._inputs[size].head(0, head_size)
                self._model.logits(size, rows, count)

    def _launch_sampling(self, sizes: Sequence[int]) -> None:
        if not self._model.has_head:
            return
        for size in self._model.head_sizes:
            if size in sizes:
                rows, slots, count = self._inputs[size].head(0, size)
                self._sampler.launch_all_kernels(self._model.logits(size, rows, count), slots, count)
