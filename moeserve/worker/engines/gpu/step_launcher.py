"""Executes the path of a step (`step_path.py`): fills its inputs, then replays its CUDA graph, launches its kernels
one by one, or runs its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.observer import LayerObserver
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.next_token_chain import NextTokenChain
from moeserve.worker.engines.gpu.steps.block_steps import BlockSteps
from moeserve.worker.engines.gpu.steps.cuda_graphs import Launches
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches, TilesOf
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_on
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath, sequences_alone
from moeserve.worker.engines.request_embeddings import EmbeddedStep
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class StepLauncher:
    """Launches the steps of one engine."""

    def __init__(
        self,
        model: GpuDecoder,
        inputs: Mapping[int, StepInputs],
        graphs: GraphSteps,
        micro_batches: MicroBatches | None,
        tiles_of: TilesOf,
        sampled: Tensor,
        from_first: FromFirst | None,
        until_ended: Callable[[], None],
        expert_cache: ExpertCache | None,
        chain: NextTokenChain | None = None,
        mark_layers: Callable[[], None] = lambda: None,
        block: BlockSteps | None = None,
    ) -> None:
        """inputs: by step size. tiles_of: tiles of prompt chunks, see `GpuEngine`. sampled, from_first: see
        `StepInputs.copy`. until_ended: waits for the running step. expert_cache: None if experts do not move.
        chain: of drafts by the model's own block; None: it has none. mark_layers: called where the layers of a step
        that waited for the tokens before it begin. block: what the block that drafts computes after a step; None: there
        is none."""
        self._model = model
        self._inputs = inputs
        self._graphs = graphs
        self._micro_batches = micro_batches
        self._tiles_of = tiles_of
        self._sampled, self._from_first = sampled, from_first
        self._until_ended = until_ended
        self.expert_cache = expert_cache
        self._place_drafts = None if chain is None else chain.place
        self._mark_layers = mark_layers
        self._block = block

    def launch(
        self,
        path: StepPath,
        layout: StepLayout,
        sequences: Sequences,
        observer: LayerObserver | None,
        embedded: EmbeddedStep | None = None,
    ) -> bool:
        """Launches the step. embedded: None if its requests have tokens only. Returns whether the head was launched
        with the layers."""
        if path.part_rows and path.graph is None:
            assert self._micro_batches is not None
            self._inputs[path.size].fill(layout, sequences)
            self._micro_batches.run_prompts(path, layout, sequences)
            return False
        replay = self._replay_of(path, layout, sequences)
        if replay is None:
            self._launch_eager(path, layout, sequences, observer, embedded)
        else:
            self._launch_graph(path, layout, sequences, replay, embedded)
        if self._block is not None:
            self._block.launch(path.size, layout.kv_slots, is_replayed=replay is not None)
        return replay is not None and path.graph is not None and path.graph.has_head

    def _replay_of(self, path: StepPath, layout: StepLayout, sequences: Sequences) -> Launches | None:
        if path.graph is None:
            return None
        if path.part_rows:
            assert self._micro_batches is not None
            return self._micro_batches.decode(path, layout, sequences)
        return self._graphs.find(path.graph)

    def _launch_graph(
        self,
        path: StepPath,
        layout: StepLayout,
        sequences: Sequences,
        replay: Launches,
        embedded: EmbeddedStep | None,
    ) -> None:
        self._model.begin()  # wakes the pool's threads while the host prepares the step
        inputs = self._inputs[path.size]
        inputs.fill(layout, sequences, embedded)
        if path.graph is not None and path.graph.family == "prompts":
            tiles = self._tiles(path, layout)[0] if path.has_tiles else np.zeros((0, 4), np.int32)
            inputs.fill_prompts(path.num_decode, tiles)
        self._copy(inputs, layout, sequences, embedded)
        with self._moving_experts(path.size, streams=False):
            replay()

    def _launch_eager(
        self,
        path: StepPath,
        layout: StepLayout,
        sequences: Sequences,
        observer: LayerObserver | None,
        embedded: EmbeddedStep | None,
    ) -> None:
        inputs = self._inputs[path.size]
        inputs.fill(layout, sequences, embedded)
        if path.has_tiles:
            inputs.fill_decode_rows(path.num_decode)
        self._copy(inputs, layout, sequences, embedded)
        tiles = tiles_on(self._model.device, self._tiles(path, layout)) if path.has_tiles else None
        batch = inputs.batch(path, tiles)
        with self._moving_experts(path.size, streams=self._model.streams(batch)):
            self._model.begin(batch)
            self._model.forward(batch, observer)

    def _copy(
        self, inputs: StepInputs, layout: StepLayout, sequences: Sequences, embedded: EmbeddedStep | None
    ) -> None:
        # No step awaits both drafts and the tokens of the step before.
        has_drafts = layout.drafted is not None and bool(layout.drafted.any())
        inputs.copy(self._sampled, self._from_first, self._place_drafts if has_drafts else None)
        if embedded is not None and embedded.spans:
            self._model.place_embeddings(inputs.size, embedded.rows)
        ngrams = self._model.shape.ngrams
        if self._model.table is not None and ngrams is not None:
            # As on the CPU, a position of an embedding span counts as the padding token.
            tokens = np.maximum(sequences.tokens[layout.sequence, layout.position], 0)
            previous = sequences.previous(layout, ngrams.hashes.size - 1)
            self._model.place_ngrams(inputs.size, tokens, previous)
        if layout.drafted is not None:
            self._mark_layers()

    def _tiles(self, path: StepPath, layout: StepLayout) -> list[Int32s]:
        """Returns the tiles of the prompt chunks, for each of the model's attention forms."""
        fields = (layout.offset, layout.count, layout.start, layout.req_slot)
        first = sequences_alone(layout.count, path.num_decode)
        return self._tiles_of(*(field[first:] for field in fields))

    @contextmanager
    def _moving_experts(self, rows: int, *, streams: bool) -> Iterator[None]:
        """A context around the launch of a step, in which the expert cache acts before and after it."""
        cache = self.expert_cache
        if cache is not None:
            cache.before_step(rows=rows, streams=streams, until_ended=self._until_ended)
        yield
        if cache is not None:
            cache.after_launch()
