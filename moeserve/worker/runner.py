"""Executes plans: plan -> rows -> model -> sampler -> result. No loop here runs over tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moeserve.kernels.cpu_stream import AttentionPlan, CpuStream, build_attention_plan
from moeserve.messages.schema import (
    ExpertUse,
    NewSeq,
    Row,
    Sampled,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerReady,
)
from moeserve.models.qwen3moe.model import Batch, Qwen3Moe
from moeserve.worker.constraints import Constraints
from moeserve.worker.sampler import SamplerState
from moeserve.worker.step_dump import StepDump, StepRecord

log = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]


class PromptSpan(NamedTuple):
    row: int  # of the plan
    places: Int32s  # rows of the step whose logits say how likely the targets were
    targets: Int32s  # token ids
    top_n: int


class Sequences:
    """What the worker remembers of each request slot. One writer: the runner.

    tokens, kv_slots: int32 [max_num_seqs, max_model_len], by position. The pages of slots that were never used
    cost nothing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.tokens: Int32s = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.kv_slots: Int32s = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_prompt = [0] * max_num_seqs
        self.prompt_logprobs: list[int | None] = [None] * max_num_seqs
        self.request_ids = [""] * max_num_seqs

    def bind(self, seq: NewSeq) -> Int32s:
        """Returns the known tokens, prompt first."""
        tokens = np.frombuffer(seq.token_ids, np.int32)
        prefix = np.frombuffer(seq.prefix_slots, np.int32)
        self.tokens[seq.req_slot, : len(tokens)] = tokens
        self.kv_slots[seq.req_slot, : len(prefix)] = prefix
        self.num_prompt[seq.req_slot] = seq.num_prompt
        self.prompt_logprobs[seq.req_slot] = seq.sampling.prompt_logprobs
        self.request_ids[seq.req_slot] = seq.request_id
        return tokens

    def append(self, slots: Int32s, positions: Int32s, tokens: Int32s) -> None:
        """Sampled tokens; the last one of a full context is never an input and has no place."""
        inside = positions < self.tokens.shape[1]
        self.tokens[slots[inside], positions[inside]] = tokens[inside]

    def prompt_spans(self, rows: list[Row], layout: Layout, at_most: int) -> Iterator[PromptSpan]:
        """What prompt logprobs a step owes, in order, in spans of up to `at_most` tokens."""
        for index, row in enumerate(rows):
            top_n = self.prompt_logprobs[row.req_slot]
            if top_n is None:
                continue
            # Position p predicts the token at p + 1; the prompt's last position predicts no prompt token.
            last = min(row.start + row.count, self.num_prompt[row.req_slot] - 1)
            for start in range(row.start, last, at_most):
                end = min(start + at_most, last)
                places = np.arange(start, end, dtype=np.int32) - row.start + layout.offset[index]
                yield PromptSpan(index, places, self.tokens[row.req_slot, start + 1 : end + 1], top_n)


def log_bound(seq: NewSeq, num_tokens: int) -> None:
    """A request has its slot, with so many tokens."""
    if log.isEnabledFor(logging.DEBUG):
        cached = len(seq.prefix_slots) // 4
        extra = {"request_id": seq.request_id}
        log.debug("slot %d: %d tokens, %d cached", seq.req_slot, num_tokens, cached, extra=extra)


class Layout:
    """A plan's rows as arrays; `offset[i]` is row i's first place in the step."""

    def __init__(self, rows: list[Row]) -> None:
        self.req_slot = np.array([row.req_slot for row in rows], np.int32)
        self.start = np.array([row.start for row in rows], np.int32)
        self.count = np.array([row.count for row in rows], np.int32)
        self.offset = np.cumsum(self.count, dtype=np.int32) - self.count
        self.n = int(self.count.sum())
        self.kv_slots = np.frombuffer(b"".join([row.kv_slots for row in rows]), np.int32)
        self.sequence = np.repeat(self.req_slot, self.count)  # [n]
        self.position = np.repeat(self.start - self.offset, self.count) + np.arange(self.n, dtype=np.int32)
        sampling = [row.sample for row in rows]
        self.sampled_slots = self.req_slot[sampling]
        self.sampled_rows = (self.offset + self.count - 1)[sampling]
        self.sampled_positions = (self.start + self.count)[sampling]  # where the new tokens will stand


def cpu_batch(
    plan: AttentionPlan, layout: Layout, sequences: Sequences, model: Qwen3Moe, stream: CpuStream
) -> Batch:
    """A step's rows for the CPU. Fills `plan`, which lasts until the next call; the rows' KV slots are remembered."""
    sequences.kv_slots[layout.sequence, layout.position] = layout.kv_slots
    build_attention_plan(
        plan,
        layout.offset,
        layout.count,
        layout.start,
        layout.req_slot,
        sequences.kv_slots,
        model.heads,
        stream.threads,
    )
    return Batch(
        n=layout.n,
        token_ids=torch.from_numpy(sequences.tokens[layout.sequence, layout.position]),
        positions=torch.from_numpy(layout.position.astype(np.int64)),
        kv_slots=torch.from_numpy(layout.kv_slots.copy()),
        plan=plan,
    )


class Runner:
    """Owns the model, the KV pool, the sampler and the grammars. Steps run one at a time, in the order of the calls."""

    def __init__(
        self,
        stream: CpuStream,
        model: Qwen3Moe,
        ready: WorkerReady,
        constraints: Constraints,
        sampler_isa: str | None,
        dump: StepDump | None = None,
    ) -> None:
        self._stream = stream
        self._model = model
        self._ready = ready
        self._sequences = Sequences(ready.max_num_seqs, ready.max_model_len)
        self._sampler = SamplerState(ready.max_num_seqs, ready.vocab_size, stream.pool, sampler_isa)
        self._constraints = constraints
        self._dump = dump
        self._plan = AttentionPlan()
        self._step_ended = time.perf_counter()

    def ready(self) -> WorkerReady:
        return self._ready

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan. The plan is the router's and trusted; any exception is fatal to the worker."""
        started = time.perf_counter()
        idle_ms = (started - self._step_ended) * 1e3
        for seq in plan.new_seqs:
            self._bind(seq)
        layout = Layout(plan.rows)
        record = None if self._dump is None else self._dump.start(layout, self._sequences, self._ready)
        batch = cpu_batch(self._plan, layout, self._sequences, self._model, self._stream)
        self._model.forward(batch, record)
        self._stream.wait()
        prompt_logprobs = self._prompt_logprobs(plan.rows, layout)
        sampled = self._sample(layout, record)
        if record is not None:
            record.finish(sampled)
        self._step_ended = time.perf_counter()
        compute_ms = (self._step_ended - started) * 1e3
        return StepResult(plan.step, sampled, prompt_logprobs, compute_ms, idle_ms)

    def expert_use(self) -> ExpertUse:
        tokens = self._model.heat[:, 0].numpy()
        layers, experts = tokens.shape
        on_gpu = np.zeros((layers, experts), np.uint8)
        return ExpertUse(layers, experts, self._ready.experts_per_token, tokens.tobytes(), on_gpu.tobytes())

    def weight_bytes_read(self) -> int:
        """Bytes of weights that the steps so far had to read: each distinct expert once a step."""
        return self._model.weight_bytes_read()

    def read_experts(self) -> tuple[float, int]:
        """Reads all experts' weights without computing anything: seconds taken, bytes read."""
        start = time.perf_counter()
        read = self._model.read_experts()
        self._stream.wait()
        return time.perf_counter() - start, read

    def _bind(self, seq: NewSeq) -> None:
        tokens = self._sequences.bind(seq)
        log_bound(seq, len(tokens))
        output = tokens[seq.num_prompt :]
        self._sampler.bind(seq.req_slot, seq.sampling, tokens[: seq.num_prompt], output)
        self._constraints.bind(seq.req_slot, seq.sampling, output)

    def _logits(self, rows: Int32s) -> torch.Tensor:
        logits = self._model.logits(torch.from_numpy(rows))
        self._stream.wait()
        return logits

    def _sample(self, layout: Layout, record: StepRecord | None) -> list[Sampled]:
        sampled: list[Sampled] = []
        for first in range(0, len(layout.sampled_rows), Qwen3Moe.LOGIT_ROWS):
            part = slice(first, first + Qwen3Moe.LOGIT_ROWS)
            slots, positions = layout.sampled_slots[part], layout.sampled_positions[part]
            logits = self._logits(layout.sampled_rows[part])
            if record is not None:
                record.logits(first, logits)
            tokens, logprobs = self._sampler.sample(logits, slots, self._constraints.masks_for(slots))
            failed = self._constraints.accept(slots, tokens)
            self._sequences.append(slots, positions, tokens)
            sampled += entries(tokens, logprobs, failed)
        return sampled

    def _prompt_logprobs(self, rows: list[Row], layout: Layout) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for span in self._sequences.prompt_spans(rows, layout, Qwen3Moe.LOGIT_ROWS):
            logits = self._logits(span.places)
            found.setdefault(span.row, []).extend(
                self._sampler.prompt_logprobs(logits, span.targets, span.top_n)
            )
        return found


def entries(tokens: Int32s, logprobs: Sequence[TokenLogprob | None], failed: dict[int, str]) -> list[Sampled]:
    """failed: of some rows, why their requests cannot go on."""
    return [
        Sampled(token_id, logprob) if row not in failed else Sampled(-1, error=failed[row])
        for row, (token_id, logprob) in enumerate(zip(tokens.tolist(), logprobs, strict=True))
    ]
