"""The CPU engine: the whole model on the C++ pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import AdapterRows, StateDrafts, StateSequences
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import NewSeq
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.workspace import CpuBatch
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS
from moeserve.models.observer import LayerObserver
from moeserve.worker.engines.cpu.sampler import CpuSampler
from moeserve.worker.engines.engine import ExpertCounts, TokenMasks
from moeserve.worker.engines.request_embeddings import EmbeddedStep, RequestEmbeddings
from moeserve.worker.sequences import Int32s, PromptSpan, Sequences, StepLayout, first_drafts


def launch(
    layout: StepLayout,
    sequences: Sequences,
    model: CpuDecoder,
    observer: LayerObserver | None = None,
    embedded: EmbeddedStep | None = None,
) -> None:
    """Launches a step, whose KV slots are recorded in the tables. embedded: None if its requests have tokens only."""
    embedded = embedded or EmbeddedStep.of_tokens(layout)
    adapters = adapter_rows(sequences.adapters[layout.sequence])
    tokens = sequences.tokens[layout.sequence, layout.position]
    if embedded.spans:
        # Positions of embedding spans have negative token numbers, which the embedding table lacks. They are replaced
        # by the padding token: in Gemma, images use the per-layer inputs of token 0.
        tokens = np.maximum(tokens, 0)
    ngrams = model.shape.ngrams
    previous = None if ngrams is None else sequences.previous(layout, ngrams.hashes.size - 1)
    model.begin(torch.from_numpy(tokens), adapters, embedded.rows, previous)
    model.forward(_batch(layout, sequences, model, adapters, embedded), observer)


def _batch(
    layout: StepLayout,
    sequences: Sequences,
    model: CpuDecoder,
    adapters: AdapterRows | None,
    embedded: EmbeddedStep,
) -> CpuBatch:
    """Returns the step's batch for the model, with the plan of its attention."""
    sequences.kv_slots[layout.sequence, layout.position] = layout.kv_slots
    windows = None
    if sequences.has_window_slots:
        sequences.window_slots[layout.sequence, layout.position] = layout.window_slots
        windows = torch.from_numpy(layout.window_slots.copy())
    model.plan_attention(
        *(layout.offset, layout.count, layout.start, layout.req_slot, sequences.kv_slots),
        sequences.window_slots if sequences.has_window_slots else None,
        embedded.ends,
        sequences.state_slots[layout.req_slot],
    )
    return CpuBatch(
        n=layout.n,
        positions=torch.from_numpy(embedded.rotary_positions),
        kv_slots=torch.from_numpy(layout.kv_slots.copy()),
        states=state_sequences(layout, sequences) if model.has_states else None,
        adapters=adapters,
        window_slots=windows,
        has_window_plan=windows is not None or embedded.ends is not None,
        first_positions=None
        if embedded.first_positions is None
        else torch.from_numpy(embedded.first_positions),
    )


def adapter_rows(adapters: Int32s) -> AdapterRows | None:
    """Groups rows by adapter. adapters: adapter of each row, -1 for none. Returns None if no row has one."""
    if adapters.max(initial=-1) < 0:
        return None
    order = np.argsort(adapters, kind="stable").astype(np.int32)
    first = int(np.count_nonzero(adapters < 0))
    return AdapterRows(torch.from_numpy(adapters), torch.from_numpy(order[first:].copy()))


def state_sequences(layout: StepLayout, sequences: Sequences) -> StateSequences:
    """Returns the sequences whose recurrent states the step's rows advance."""
    slots, drafts = sequences.state_slots[layout.req_slot], None
    if layout.drafted is not None and layout.drafted.any():
        drafts = StateDrafts(torch.from_numpy(layout.drafted), torch.from_numpy(first_drafts(layout.drafted)))
    row, count, slot = (torch.from_numpy(column) for column in (layout.offset, layout.count, slots))
    return StateSequences(row, count, slot, drafts)


class CpuEngine:
    """An `Engine`. A row's results do not depend on the other rows, on the division into chunks, or on the number of
    threads."""

    logit_rows = CPU_LOGIT_ROWS
    counts_every_step = True
    waits_for_logits = True
    kernels_compiled = 0
    runs_ahead = False
    is_computed = False

    def __init__(
        self,
        stream: CpuStream,
        model: CpuDecoder,
        sampler: CpuSampler,
        embeddings: RequestEmbeddings | None = None,
        products: str = "",
    ) -> None:
        """embeddings: None if requests have none. products: description of the products that another instruction set
        computes."""
        self._stream = stream
        self._products = products
        self._embeddings = embeddings
        self._model = model
        self._sampler = sampler
        self._last_logits: Tensor | None = None
        self._state_slots: Int32s = np.zeros(0, np.int32)  # state slots of the step's rows
        self._sampled: tuple[Int32s, list[TokenLogprob | None]] = (np.zeros(0, np.int32), [])

    @property
    def description(self) -> str:
        nodes = f" on {self._stream.nodes} NUMA nodes" if self._stream.nodes > 1 else ""
        products = f"; {self._products}" if self._products else ""
        return f"cpu ({self._stream.isa}, {self._stream.threads} threads{nodes}{products})"

    @property
    def stream(self) -> CpuStream:
        return self._stream

    def warm_on(self, *, is_idle: bool) -> bool:
        return False

    def settle_states(self) -> None:
        """Does nothing: `commit_states` changes the states."""

    def copy_states(self, pairs: Int32s) -> None:
        self._model.copy_states(torch.from_numpy(pairs.copy()))

    def bind(self, seq: NewSeq, tokens: Int32s) -> None:
        prompt, output = tokens[: seq.num_prompt], tokens[seq.num_prompt :]
        if self._embeddings is not None:
            self._embeddings.bind(seq)
            prompt = prompt[prompt >= 0]  # penalties apply only to tokens
        self._sampler.bind(seq.req_slot, seq.sampling, prompt, output)

    def fork(self, targets: Int32s, sources: Int32s, end: int) -> None:
        """Does nothing: the pool reads the host's tables."""

    def forward(
        self, layout: StepLayout, sequences: Sequences, *, has_new: bool, observer: LayerObserver | None
    ) -> None:
        embedded = None if self._embeddings is None else self._embeddings.of_step(layout)
        launch(layout, sequences, self._model, observer, embedded)
        self._state_slots = sequences.state_slots[layout.req_slot]

    def score(self, span: PromptSpan) -> list[TokenLogprob]:
        return self._sampler.prompt_logprobs(self._logits(span.logit_rows), span.targets, span.top_n)

    def logits(self, layout: StepLayout, first: int) -> Tensor:
        """Returns the logits of up to `logit_rows` of the last step's sampled rows, from the `first` on: float32 [rows,
        vocab]."""
        self._last_logits = self._logits(layout.sampled_rows[first : first + self.logit_rows])
        return self._last_logits

    def logits_of(self, rows: Int32s) -> Tensor:
        """Returns the logits of these rows of the last step: float32 [len(rows), vocab]."""
        return self._logits(rows)

    def sample_at_once(self, logits: Tensor, slots: Int32s, ahead: Int32s) -> None:
        """Returns None, so that the caller samples row by row: on the CPU no device has to be waited for, so one call
        for all rows would save nothing."""

    def sample_from(
        self, logits: Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        return self._sampler.sample(logits, slots, masks)

    def commit_states(self, layout: StepLayout, accepted: Int32s) -> None:
        if not self._model.has_states:
            return
        assert layout.drafted is not None
        moved = accepted > 0
        columns = self._state_slots[moved], first_drafts(layout.drafted)[moved], accepted[moved]
        self._model.commit_states(*map(torch.from_numpy, columns))

    def sample(self, slots: Int32s, masks: TokenMasks | None) -> None:
        assert self._last_logits is not None
        self._sampled = self._sampler.sample(self._last_logits, slots, masks)

    def sampled(self) -> tuple[Int32s, list[TokenLogprob | None]]:
        return self._sampled

    def mark_end(self) -> None:
        """Does nothing: a step ends before the next is launched."""

    def begin(self) -> None:
        """Does nothing: the host's clock times the steps."""

    def launches_at_once(self, counts: Sequence[int], drafts: Sequence[int]) -> bool:
        return False

    def finish(self) -> float:
        self._stream.wait()  # for steps without logits
        return 0.0

    @property
    def layers_ms(self) -> float:
        return 0.0

    def forget(self, layout: StepLayout) -> None:
        self._model.forget(layout.kv_slots.tolist(), layout.window_slots.tolist() or None)
        self._stream.wait()

    def expert_counts(self) -> ExpertCounts:
        tokens = self._model.expert_token_counts[:, 0].numpy()
        return ExpertCounts(tokens, np.zeros(tokens.shape, np.uint8))

    def take_expert_cache_counts(self) -> None:
        return None

    def weight_counters(self) -> object:
        return self._model.weight_bytes_read()

    def weight_bytes_since(self, counters: object) -> int:
        assert isinstance(counters, int)
        return self._model.weight_bytes_read() - counters

    def read_weights(self) -> tuple[float, int]:
        return self._model.read_experts()

    def _logits(self, rows: Int32s) -> Tensor:
        logits = self._model.logits(torch.from_numpy(rows))
        self._stream.wait()
        return logits
