"""The GPU engine. Steps run as CUDA graphs where possible; the CPU pool computes the experts in RAM.

The host does little per step: it fills one pinned buffer, launches one graph (embedding to logits), queues the
sampling after it, and waits once, for the tokens. Before it waits it may launch the next step's layers, which take
the tokens on the GPU. If the first layers are on the CPU (`cpu_stage.py`), it first waits for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.collectives.all_reduce import FromFirst
from moeserve.kernels.next_token.op import SampledStep
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import NewSeq
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
from moeserve.models.loading.ram_experts import RamExperts
from moeserve.models.observer import LayerObserver
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.processes.cpus import usable_cores
from moeserve.worker.engines.engine import ExpertCounts, SampledAtOnce, TokenMasks
from moeserve.worker.engines.gpu.compile_ahead import KernelLaunches
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.engines.gpu.drafted_choice import DraftedChoice
from moeserve.worker.engines.gpu.dummy_steps import DummySteps
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.next_token_chain import NextTokenChain
from moeserve.worker.engines.gpu.sampler import GpuSampler
from moeserve.worker.engines.gpu.step_launcher import StepLauncher
from moeserve.worker.engines.gpu.steps.block_steps import BlockSteps
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.engines.gpu.steps.inputs_maker import inputs_maker
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches
from moeserve.worker.engines.gpu.steps.pinned import padded
from moeserve.worker.engines.gpu.steps.prompt_tiles import tiles_of
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.engines.gpu.steps.step_completion import StepCompletion
from moeserve.worker.engines.gpu.steps.step_facts import step_facts
from moeserve.worker.engines.gpu.steps.step_path import StepFacts, StepShape, graph_keys, padded_size
from moeserve.worker.engines.gpu.steps.step_paths import StepPaths
from moeserve.worker.engines.gpu.token_choice import LogitRows, TokenChoice
from moeserve.worker.engines.gpu.warm_up import WarmUp
from moeserve.worker.engines.gpu.weight_reads import GpuWeightReads
from moeserve.worker.engines.request_embeddings import RequestEmbeddings
from moeserve.worker.sequences import Int32s, PromptSpan, Sequences, StepLayout, first_drafts


class GpuEngine:
    """The `Engine` of one GPU; the CPU pool computes the experts in RAM."""

    counts_every_step = False
    waits_for_logits = False

    def __init__(
        self,
        model: GpuDecoder,
        tables: SlotTables,
        max_num_seqs: int,
        description: str,
        ram_experts: RamExperts | None = None,
        cpu_stage: CpuStage | None = None,
        expert_cache: ExpertCache | None = None,
        agree: Callable[[bool], bool] = bool,
        from_first: FromFirst | None = None,
        max_drafts: int = 0,
        embeddings: RequestEmbeddings | None = None,
    ) -> None:
        """tables: slot tables of max_num_seqs + 1 request slots. ram_experts: None if all experts are on the GPU.
        cpu_stage: the layers before the model's, if the model has no embedding. agree: returns whether a condition
        holds on all of several GPUs, which must capture the same graphs and divide steps alike. from_first:
        broadcasts tokens if several GPUs have a part of every layer; only the first one samples. max_drafts: per
        row. embeddings: None if requests have none."""
        self._embeddings = embeddings
        self._model = model
        self._description = description
        self._tables = tables
        self._cpu_stage = cpu_stage
        self._weights = GpuWeightReads(model, ram_experts, cpu_stage)
        self.logit_rows = model.head_sizes[-1]
        yields = ram_experts is not None and ram_experts.stream.threads >= usable_cores()
        self._done = StepCompletion(model.device, self.logit_rows, yields=yields)
        # False if the host computes a step's first layers, or looks up the n-grams of its tokens, or if other GPUs have
        # other layers, or if experts are on disk: a step's rows that lack one must be known before the next step.
        # Experts in RAM with several GPUs are not tested.
        is_alone = ram_experts is None or (from_first is None and ram_experts.disk is None)
        needs_host = cpu_stage is not None or model.table is not None
        self.runs_ahead = agree(is_alone and not needs_host and model.stage is None)
        self._sampler = GpuSampler(max_num_seqs, model.shape.vocab_size, self.logit_rows, model.device)
        self._choice = TokenChoice(self._sampler, self._done)
        self._drafted = DraftedChoice(model, self._sampler, self._choice, max_num_seqs)
        if from_first is not None:
            from_first(self._sampler.tokens)  # the first call times the transfers and selects the fastest
        all_on_gpu = ram_experts is None and cpu_stage is None
        takes_parts = model.stage is not None and model.stage.takes_parts and ram_experts is None
        facts = step_facts(
            model,
            max_num_seqs,
            captures_prompts=agree(all_on_gpu),
            takes_parts=agree(takes_parts),
            max_drafts=max_drafts,
        )
        self.paths = StepPaths(facts)
        make_inputs = inputs_maker(model, tables, self.logit_rows, dummy_slot=max_num_seqs)
        self._inputs = {
            size: make_inputs(size, max_tiles=facts.max_tiles.get(size, 0)) for size in model.sizes
        }
        self._graphs = GraphSteps(model, self._inputs, facts)
        chunk_tiles = partial(tiles_of, model.shape.forms)
        self.micro_batches: MicroBatches | None = None  # None: steps are never divided
        if facts.takes_parts:
            self.micro_batches = MicroBatches(
                model, self._inputs, make_inputs, chunk_tiles, max_num_seqs, facts
            )
        # Drafts by the model's next-token block; None: it has none, or it must not draft.
        block = model.next_token
        self.next_token_chain: NextTokenChain | None = None
        self.block_steps: BlockSteps | None = None
        if block is not None:
            self.next_token_chain = NextTokenChain(block, model.device, max_num_seqs, self._sampled_step)
            captured = sorted({key.size for key in graph_keys(facts)})
            self.block_steps = BlockSteps(model, self._inputs, captured)
        self._launcher = StepLauncher(
            *(model, self._inputs, self._graphs, self.micro_batches, chunk_tiles),
            self._sampler.tokens,
            from_first,
            self._done.wait,
            expert_cache,
            self.next_token_chain,
            self._done.mark_layers,
            self.block_steps,
        )
        kernels = KernelLaunches(model, self._inputs, self._sampler, chunk_tiles, facts, self._drafted)
        self.warm_up = WarmUp(
            *(self._graphs, kernels.launch_all, facts, self.micro_batches, expert_cache),
            [part for part in (self.block_steps, self.next_token_chain) if part is not None],
        )
        self.dummy_steps = DummySteps(
            model,
            self._inputs,
            self._graphs,
            self.micro_batches,
            cpu_stage,
            chunk_tiles,
            max_num_seqs,
            self.paths.path,
            self._wait_for_dummy,
        )
        # State of the step in progress.
        self._step = self._inputs[model.sizes[0]]
        self._has_logits = False
        self._num_sampled = 0
        self._state_slots: Int32s = np.zeros(0, np.int32)  # state slots of the step's rows
        self._rows: LogitRows | None = None

    def _sampled_step(self) -> SampledStep:
        return SampledStep(self._sampler.tokens, self._step.token_ids, self._step.num_rows)

    @property
    def description(self) -> str:
        return self._description

    @property
    def can_stream(self) -> bool:
        """See `GpuDecoder`."""
        return self._model.can_stream

    @property
    def forced_routing(self) -> ForcedRouting | None:
        return self._model.forced_routing

    @property
    def expert_cache(self) -> ExpertCache | None:
        """The expert cache; None if experts stay where they are placed."""
        return self._launcher.expert_cache

    @expert_cache.setter
    def expert_cache(self, cache: ExpertCache | None) -> None:
        self._launcher.expert_cache = cache

    @property
    def facts(self) -> StepFacts:
        return self.paths.facts

    @property
    def streaming(self) -> Streaming:
        """The fraction of RAM experts that steps with prompts stream."""
        return self.facts.streaming

    def stream_by(self, streaming: Streaming, described: str) -> None:
        """Sets `streaming`, and adds it to the engine's description."""
        self.paths.stream(streaming)
        self._description = f"{self._description.removesuffix(')')}, {described})"

    @property
    def kernels_compiled(self) -> int:
        return self.warm_up.missed

    def warm_on(self, *, is_idle: bool) -> bool:
        return self.warm_up.go_on(is_idle=is_idle)

    def settle_states(self) -> None:
        self._drafted.settle()
        if self.block_steps is not None:
            self.block_steps.settle()

    def copy_states(self, pairs: Int32s) -> None:
        self._drafted.settle()
        self._model.copy_states([(int(source), int(target)) for source, target in pairs])
        if self._cpu_stage is not None:
            self._cpu_stage.copy_states(pairs)

    def bind(self, seq: NewSeq, tokens: Int32s) -> None:
        self._tables.bind(seq)
        prompt, output = tokens[: seq.num_prompt], tokens[seq.num_prompt :]
        if self._embeddings is not None:
            self._embeddings.bind(seq)
            prompt = prompt[prompt >= 0]  # penalties apply only to tokens
        self._sampler.bind(seq.req_slot, seq.sampling, prompt, output)

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        self._tables.fork(targets, sources, end)

    def forward(
        self, layout: StepLayout, sequences: Sequences, *, has_new: bool, observer: LayerObserver | None
    ) -> None:
        """Launches the step. A decode step's CUDA graph includes the head."""
        self._drafted.settle()
        embedded = None if self._embeddings is None else self._embeddings.of_step(layout)
        shape = StepShape(
            layout.count,
            layout.n,
            has_new,
            self._scope_of(layout, sequences),
            observer is not None,
            embedded is not None and embedded.ends is not None,
            layout.drafted,
        )
        path = self.paths.path(shape)
        self._state_slots = sequences.state_slots[layout.req_slot]
        self._step, self._num_sampled = self._inputs[path.size], len(layout.sampled_rows)
        if self._cpu_stage is not None:
            self._cpu_stage.compute(layout, sequences, observer, embedded)
        self._has_logits = self._launcher.launch(path, layout, sequences, observer, embedded)

    def _scope_of(self, layout: StepLayout, sequences: Sequences) -> AdapterScope:
        adapters = self._model.adapters
        if adapters is None:
            return AdapterScope.NONE
        return adapters.scope_for(sequences.adapters[layout.req_slot].tolist())

    def score(self, span: PromptSpan) -> list[TokenLogprob]:
        """Computes prompt logprobs in the logits buffer, which invalidates the logits of the step's graph."""
        self._has_logits = False
        n, device = len(span.logit_rows), self._model.device
        size = padded_size(n, self._model.head_sizes)
        rows, targets = (padded(ids, size).to(device) for ids in (span.logit_rows, span.targets))
        count = torch.tensor([n], dtype=torch.int32, device=device)
        scores = self._sampler.score(self._model.logits(self._step.size, rows, count), targets, count)
        return [entry for entry in scores.read([span.top_n] * n) if entry is not None]

    def logits(self, layout: StepLayout, first: int) -> Tensor:
        """Returns the logits of up to `logit_rows` of the last step's sampled rows, from the `first` on: float32 [rows,
        vocab], on the GPU."""
        n = min(len(layout.sampled_rows) - first, self.logit_rows)
        size = self._step.size if self._has_logits else padded_size(n, self._model.head_sizes)
        rows, slots, count = self._step.head(first // self.logit_rows, size)
        if self._has_logits:
            logits = self._graphs.logits[size]
        else:
            logits = self._model.logits(self._step.size, rows, count)
        self._rows = LogitRows(logits, slots, count)
        return logits[:n]

    def logits_of(self, rows: Int32s) -> Tensor:
        """Returns the logits of these rows of the last step: float32 [len(rows), vocab], on the GPU."""
        n = len(rows)
        if self._has_logits and n == self._num_sampled:  # all sampled rows, in the head's order
            return self._graphs.logits[self._step.size][:n]
        return self._drafted.logits(self._step.size, rows)

    def sample_at_once(
        self, logits: Tensor, slots: Int32s, ahead: Int32s
    ) -> Callable[[], SampledAtOnce] | None:
        return self._drafted.sample_at_once(logits, slots, ahead)

    def sample_from(
        self, logits: Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        return self._drafted.sample_from(logits, slots, masks)

    def commit_states(self, layout: StepLayout, accepted: Int32s) -> None:
        if self._model.has_state_drafts:
            self._drafted.commit_states(layout, self._state_slots, accepted)
        if self._cpu_stage is not None and layout.drafted is not None:
            moved = accepted > 0
            columns = self._state_slots, first_drafts(layout.drafted), accepted
            self._cpu_stage.commit_states(*(column[moved] for column in columns))

    def sample(self, slots: Int32s, masks: TokenMasks | None) -> None:
        assert self._rows is not None
        self._choice.launch(self._rows, slots, masks)

    def sampled(self) -> tuple[Int32s, list[TokenLogprob | None]]:
        return self._choice.read()

    def mark_end(self) -> None:
        self._choice.mark_end()

    @property
    def is_computed(self) -> bool:
        return self._done.is_reached

    def begin(self) -> None:
        self._done.begin()

    def launches_at_once(self, counts: Sequence[int], drafts: Sequence[int]) -> bool:
        return self.paths.path(StepShape.of(counts, drafts)).launches_at_once

    def finish(self) -> float:
        interval_ms = self._done.finish()
        self._model.check()
        return interval_ms

    @property
    def layers_ms(self) -> float:
        return self._done.layers_ms + (0.0 if self._cpu_stage is None else self._cpu_stage.ms)

    def forget(self, layout: StepLayout) -> None:
        slots = layout.kv_slots.tolist(), layout.window_slots.tolist() or None
        self._model.forget(*slots)
        if self._cpu_stage is not None:
            self._cpu_stage.forget(*slots)
        if self.expert_cache is not None:
            self.expert_cache.forget_counts()
        self._tables.forget(layout.req_slot.tolist())

    def _wait_for_dummy(self) -> None:
        self._done.mark()
        self.finish()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this context is open, steps run only this GPU's own layers, without the other GPUs."""
        stage = self._model.stage
        if stage is not None:
            stage.be_alone(alone=True)
        try:
            yield
        finally:
            if stage is not None:
                stage.be_alone(alone=False)

    @property
    def prompt_sizes(self) -> list[int]:
        """The step sizes that may be divided."""
        return [size for size in self._model.sizes if size > SMALL_BATCH_ROWS]

    @property
    def max_step_rows(self) -> int:
        """Largest number of rows of a step."""
        return self._model.sizes[-1]

    def expert_counts(self) -> ExpertCounts:
        tokens = self._model.expert_token_counts.cpu().numpy()
        on_gpu = self._model.on_gpu.numpy().astype(np.uint8)
        if self._cpu_stage is not None:
            of_stage = self._cpu_stage.expert_token_counts
            tokens = np.concatenate([of_stage, tokens])
            on_gpu = np.concatenate([np.zeros_like(of_stage, np.uint8), on_gpu])
        return ExpertCounts(tokens, on_gpu, None if self.expert_cache is None else self.expert_cache.totals)

    def take_expert_cache_counts(self) -> ExpertCacheCounts | None:
        return None if self.expert_cache is None else self.expert_cache.take_counts()

    def weight_counters(self) -> object:
        return self._weights.counters()

    def weight_bytes_since(self, counters: object) -> int:
        return self._weights.bytes_since(counters)

    def read_weights(self) -> tuple[float, int]:
        return self._weights.read()
