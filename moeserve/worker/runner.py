"""Executes plans: plan -> rows -> model -> sampler -> result. No loop here runs over tokens."""

from __future__ import annotations

import time

import numpy as np
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
from moeserve.worker.sequences import Int32s, Layout, Sequences, entries, log_bound
from moeserve.worker.step_dump import StepDump, StepRecord


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

    def rehearse(self, plan: StepPlan) -> StepResult:
        """`step` before the first request, in slots that nobody has yet: no KV, no count and no dump stays of it."""
        dump, self._dump = self._dump, None
        result = self.step(plan)
        self._dump = dump
        self._model.forget(Layout(plan.rows).kv_slots.tolist())
        return result

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
        return self._model.read_experts()

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
