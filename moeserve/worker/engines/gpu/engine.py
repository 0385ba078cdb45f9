"""The model on a GPU, decode steps recorded as CUDA graphs, with the pool beside it for what lies in RAM.

The host does little in a step: it fills one pinned buffer, starts one graph (embedding to logits), then queues the
sampling behind it while the GPU works, and waits once, for the tokens. Before it waits it may launch the next step's
layers, which take the tokens on the GPU. First it waits for layers that are the CPU's (`cpu_stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.collectives.all_reduce import FromFirst
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
from moeserve.worker.engines.engine import ExpertCounts, TokenMasks
from moeserve.worker.engines.gpu.compile_ahead import launch_every_kind
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.engines.gpu.dummy_steps import DummySteps
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.expert_streaming import Streaming
from moeserve.worker.engines.gpu.sampler import GpuSampler
from moeserve.worker.engines.gpu.steps.graph_steps import RecordedSteps, StepKind
from moeserve.worker.engines.gpu.steps.micro_batches import MicroBatches
from moeserve.worker.engines.gpu.steps.prompt_tiles import most_tiles, tiles_of, tiles_on
from moeserve.worker.engines.gpu.steps.row_counts import leading_ones, padded, rounded
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.engines.gpu.steps.step_completion import StepCompletion
from moeserve.worker.engines.gpu.steps.step_inputs import MAX_RECORDED_DECODE, StepInputs
from moeserve.worker.engines.gpu.token_choice import LogitRows, TokenChoice
from moeserve.worker.engines.gpu.warm_up import WarmUp
from moeserve.worker.engines.gpu.weight_reads import GpuWeightReads
from moeserve.worker.sequences import Int32s, PromptSpan, Sequences, StepLayout


class GpuEngine:
    """See `Engine`."""

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
    ) -> None:
        """tables: the model's, of max_num_seqs + 1 request slots. ram_experts: the model's, where there are any.
        cpu_stage: the layers before the model's, if it has no embedding. agree: whether a condition holds on all of
        several GPUs, which record the same steps and run them in the same parts. from_first: where each of them has a
        part of every layer: only the first one samples."""
        self._model = model
        self._tiles_of = partial(tiles_of, model.shape.forms)
        self._on_device = partial(tiles_on, model.device)
        self._description = description
        self._max_num_seqs = max_num_seqs
        self._tables = tables
        self._cpu_stage = cpu_stage
        self._weights = GpuWeightReads(model, ram_experts, cpu_stage)
        self.expert_cache = expert_cache  # None: experts stay where they are
        self.logit_rows = model.head_sizes[-1]
        yields = ram_experts is not None and ram_experts.stream.threads >= usable_cores()
        self._done = StepCompletion(model.device, self.logit_rows, yields=yields)
        # The host computes the first layers of a step, or GPUs of other layers have its rows; with experts in RAM on
        # several GPUs nobody has tried.
        is_alone = ram_experts is None or from_first is None
        self.runs_ahead = agree(is_alone and cpu_stage is None and model.stage is None)
        self._sampler = GpuSampler(max_num_seqs, model.shape.vocab_size, self.logit_rows, model.device)
        self._choice = TokenChoice(self._sampler, self._done)
        self._from_first = from_first
        if from_first is not None:
            from_first(self._sampler.tokens)  # the way that is fastest is found
        records_prompts = agree(
            ram_experts is None
            and cpu_stage is None
            and not model.has_states
            and len(model.shape.forms) == 1  # a recorded step has one list of tiles
        )
        self._make_inputs = partial(
            StepInputs,
            head_rows=self.logit_rows,
            nobody=max_num_seqs,
            device=model.device,
            max_model_len=tables.slots.shape[1],
            num_kv_slots=model.num_kv_slots,
            has_states=model.has_states,
            has_adapters=model.adapters is not None,
            has_windows=tables.windows is not None,
        )
        self._inputs = {
            size: self._make_inputs(size, max_tiles=most_tiles(model.shape, size) * records_prompts)
            for size in model.sizes
        }
        self._recorded = RecordedSteps(model, self._inputs)
        # None: steps go whole. The pool would compute each part's experts in RAM by themselves.
        self.micro_batches: MicroBatches | None = None
        takes_parts = model.stage is not None and model.stage.takes_parts and ram_experts is None
        if agree(takes_parts):
            self.micro_batches = MicroBatches(
                model, self._inputs, self._make_inputs, self._tiles_of, max_num_seqs
            )
        self.warm_up = WarmUp(
            self._recorded,
            self._launch_every_kind,
            model.sizes,
            max_num_seqs,
            self.micro_batches,
            expert_cache,
        )
        self.dummy_steps = DummySteps(
            model,
            self._inputs,
            self._recorded,
            self.micro_batches,
            cpu_stage,
            self._tiles_of,
            max_num_seqs,
            self._wait_for_dummy,
        )
        self.streaming = Streaming()  # which part of the RAM experts a step with a prompt streams: none
        # Of the step under way.
        self._step = self._inputs[model.sizes[0]]
        self._has_logits = False
        self._rows: LogitRows | None = None

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

    def stream_by(self, streaming: Streaming, described: str) -> None:
        """Which part of the RAM experts steps with prompts stream; the engine's description then says so."""
        self.streaming = streaming
        self._description = f"{self._description.removesuffix(')')}, {described})"

    def _launch_every_kind(self, sizes: Sequence[int]) -> None:
        one = np.ones(1, np.int32)
        tiles = self._on_device(self._tiles_of(one, one, one, one))
        launch_every_kind(self._model, sizes, self._inputs, self._sampler, self._recorded.scopes, tiles)

    @property
    def kernels_compiled(self) -> int:
        return self.warm_up.missed

    def warm_on(self, *, is_idle: bool) -> bool:
        return self.warm_up.go_on(is_idle=is_idle)

    def copy_states(self, pairs: Int32s) -> None:
        self._model.copy_states([(int(source), int(target)) for source, target in pairs])
        if self._cpu_stage is not None:
            self._cpu_stage.copy_states(pairs)

    def bind(self, seq: NewSeq, tokens: Int32s) -> None:
        self._tables.bind(seq)
        prompt, output = tokens[: seq.num_prompt], tokens[seq.num_prompt :]
        self._sampler.bind(seq.req_slot, seq.sampling, prompt, output)

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        self._tables.fork(targets, sources, end)

    def forward(
        self, layout: StepLayout, sequences: Sequences, *, has_new: bool, observer: LayerObserver | None
    ) -> None:
        """Launches the step, with the head where it is a recorded one. A step that is observed never is."""
        self._step = inputs = self._inputs[rounded(layout.n, self._model.sizes)]
        if self._cpu_stage is not None:
            self._cpu_stage.compute(layout, sequences, observer)
        # A request that is new may read the KV of rows of this very step, beside its own.
        independent = layout.n == 1 or (layout.n == len(layout.count) and not has_new)
        each_alone = layout.n <= SMALL_BATCH_ROWS or layout.n == len(layout.count)
        kind = StepKind(inputs.size, self._scope_of(layout, sequences))
        recorded = None
        if each_alone and observer is None:
            if self.micro_batches is not None and independent:
                recorded = self.micro_batches.decode(inputs.size, layout, sequences)
            recorded = recorded or self._recorded.decode(kind, independent=independent)
        self._has_logits = recorded is not None
        if recorded is not None:
            self._model.begin()  # the pool's threads wake while the host prepares the step
            inputs.fill(layout, sequences)
            inputs.copy(self._sampler.tokens, self._from_first)
            with self._promoting():
                recorded()
            return
        inputs.fill(layout, sequences)
        num_decode = layout.n if each_alone else leading_ones(layout.count)
        parted = self.micro_batches if observer is None else None
        if parted is not None and parted.run_prompts(inputs.size, layout, sequences):
            return
        if observer is None and self._replay_prompts(kind, layout, num_decode, each_alone=each_alone):
            return
        inputs.copy(self._sampler.tokens, self._from_first)
        tiles = None if each_alone else self._on_device(self._tiles(layout, num_decode))
        streamed = 0.0 if tiles is None else self.streaming.part(layout.n)
        batch = inputs.batch(num_decode, tiles, streamed, rows_independent=independent, scope=kind.scope)
        with self._promoting(streams=self._model.streams(batch)):
            self._model.begin(batch)
            self._model.forward(batch, observer)

    def _scope_of(self, layout: StepLayout, sequences: Sequences) -> AdapterScope:
        adapters = self._model.adapters
        asked = sequences.adapters[layout.req_slot].tolist()
        return AdapterScope.NONE if adapters is None else adapters.scope_for(asked)

    @contextmanager
    def _promoting(self, *, streams: bool = False) -> Iterator[None]:
        """Around a step's launch."""
        cache = self.expert_cache
        if cache is not None:
            cache.before_step(streams=streams, until_ended=self._done.wait)
        yield
        if cache is not None:
            cache.after_launch()

    def _replay_prompts(
        self, kind: StepKind, layout: StepLayout, num_decode: int, *, each_alone: bool
    ) -> bool:
        """Whether the step fits a recorded one, which then runs."""
        inputs = self._step
        replay = self._recorded.prompts(kind)
        if replay is None or num_decode > MAX_RECORDED_DECODE:
            return False
        tiles = np.zeros((0, 4), np.int32) if each_alone else self._tiles(layout, num_decode)[0]
        if len(tiles) > inputs.max_tiles:
            return False
        inputs.fill_prompts(num_decode, tiles)
        inputs.copy(self._sampler.tokens, self._from_first)
        self._model.begin()
        replay()
        return True

    def score(self, span: PromptSpan) -> list[TokenLogprob]:
        """Prompt logprobs reuse the logits buffer, so a recorded step's logits are no longer valid."""
        self._has_logits = False
        n, device = len(span.logit_rows), self._model.device
        size = rounded(n, self._model.head_sizes)
        rows, targets = (padded(ids, size).to(device) for ids in (span.logit_rows, span.targets))
        count = torch.tensor([n], dtype=torch.int32, device=device)
        scores = self._sampler.score(self._model.logits(self._step.size, rows, count), targets, count)
        return [entry for entry in scores.read([span.top_n] * n) if entry is not None]

    def logits(self, layout: StepLayout, first: int) -> Tensor:
        n = min(len(layout.sampled_rows) - first, self.logit_rows)
        size = self._step.size if self._has_logits else rounded(n, self._model.head_sizes)
        rows, slots, count = self._step.head(first // self.logit_rows, size)
        if self._has_logits:
            logits = self._recorded.logits[size]
        else:
            logits = self._model.logits(self._step.size, rows, count)
        self._rows = LogitRows(logits, slots, count)
        return logits[:n]

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

    def launches_at_once(self, rows: int, *, has_prompts: bool) -> bool:
        return self._recorded.covers(rows, has_prompts=has_prompts)

    def finish(self) -> float:
        interval_ms = self._done.finish()
        self._model.check()
        return interval_ms

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
        """Within, steps are this GPU's own layers' alone, of whatever several GPUs have."""
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
        """Of steps that may go in parts."""
        return [size for size in self._model.sizes if size > SMALL_BATCH_ROWS]

    @property
    def max_step_rows(self) -> int:
        """The most rows of a step."""
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

    def _tiles(self, layout: StepLayout, num_decode: int) -> list[Int32s]:
        """Of the chunks behind the first `num_decode` rows."""
        chunks = slice(num_decode, None)
        fields = (layout.offset, layout.count, layout.start, layout.req_slot)
        return self._tiles_of(*(field[chunks] for field in fields))
