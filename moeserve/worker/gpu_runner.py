"""Executes plans on the GPU: what `runner.py` does on the CPU, with decode steps recorded as CUDA graphs.

The host does little in a step: it fills one pinned buffer, starts one graph (embedding to logits), then queues the
sampling behind it while the GPU works, and waits once, for the tokens. Where the first layers are the CPU's
(`first_layers.py`), it waits for them before.
"""

from __future__ import annotations

import time
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.attention.op import prefill_tiles
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
from moeserve.models.qwen3moe.cpu_experts import ExpertsInRam
from moeserve.models.qwen3moe.gpu_model import SMALL_BATCH_ROWS, GpuBatch, GpuQwen3Moe
from moeserve.worker.calibration import Calibration, Streaming, calibrate
from moeserve.worker.constraints import Constraints
from moeserve.worker.first_layers import FirstLayers
from moeserve.worker.gpu_inputs import StepInputs
from moeserve.worker.gpu_sampler import GpuSampler
from moeserve.worker.graphs import Launches, Recorder
from moeserve.worker.sequences import Int32s, Layout, Sequences, entries, log_bound
from moeserve.worker.step_dump import StepDump, StepRecord
from moeserve.worker.step_end import StepEnd

COPIED = 1 << 30  # bytes
CALIBRATED = (64, 128, 256, 512, 1024, 2048)  # tokens


class GpuRunner:
    """Owns the model, the KV pool, the sampler and the grammars. Steps run one at a time, in the order of the calls."""

    def __init__(
        self,
        model: GpuQwen3Moe,
        slot_table: Tensor,
        ready: WorkerReady,
        constraints: Constraints,
        experts_in_ram: ExpertsInRam | None = None,
        first_layers: FirstLayers | None = None,
        dump: StepDump | None = None,
    ) -> None:
        """slot_table: int32 [max_num_seqs + 1, max_model_len] on the device, the model's; its last row is nobody's.
        experts_in_ram: the model's, where there are any. first_layers: those before the model's, if it has no
        embedding."""
        self._model = model
        self._ready = ready
        self._device_name = ready.device
        self._slot_table = slot_table
        self._experts_in_ram = experts_in_ram
        self._first_layers = first_layers
        self._done = StepEnd(model.device, head_rows=model.head_sizes[-1], yields=experts_in_ram is not None)
        self._sequences = Sequences(ready.max_num_seqs, ready.max_model_len)
        head_rows = model.head_sizes[-1]
        self._sampler = GpuSampler(ready.max_num_seqs, ready.vocab_size, head_rows, model.device)
        self._constraints = constraints
        self._dump = dump
        self._inputs = {
            size: StepInputs(size, min(size, head_rows), ready.max_num_seqs, model.device)
            for size in model.sizes
        }
        self._decode: dict[int, Launches] = {}  # by size: recorded steps whose rows are apart
        self._small_batches: dict[
            int, Launches
        ] = {}  # and of up to SMALL_BATCH_ROWS rows of which some are of one prompt
        self._logits: dict[int, Tensor] = {}  # what a recorded step leaves its logits in
        self.streaming = Streaming()  # the RAM experts are never streamed
        self._step_ended = time.perf_counter()

    def ready(self) -> WorkerReady:
        return self._ready

    def record(self) -> None:
        """Compiles and records the decode steps of all sizes up to max_num_seqs. Before the first step."""
        recorder = Recorder(self._model.device)
        most = _rounded(self._ready.max_num_seqs, self._model.sizes)
        for size in reversed([size for size in self._model.head_sizes if size <= most]):
            for recorded, rows_independent in ((self._decode, True), (self._small_batches, False)):
                if rows_independent or 1 < size <= SMALL_BATCH_ROWS:
                    launches = partial(self._decode_step, size, rows_independent)
                    recorded[size] = recorder.record(launches, self._model.begin)

    def stream_by(self, streaming: Streaming, described: str) -> None:
        """Which part of the RAM experts steps with prompts stream; the engine's description then says so."""
        self.streaming = streaming
        name = self._device_name.removesuffix(")")
        self._ready = msgspec.structs.replace(self._ready, device=f"{name}, {described})")

    def calibrate(self) -> Calibration:
        """Finds out which part to stream, in some seconds, and does so; it may be nothing, whatever the step."""
        limit = min(self._model.sizes[-1], self._ready.max_model_len)
        found = calibrate(self.time_step, [size for size in CALIBRATED if size <= limit])
        self.stream_by(found.streaming, found.described())
        return found

    def time_step(self, n: int, part: float) -> float:
        """Seconds of a prompt of n tokens for which this part of the RAM experts is streamed, the better of two.
        Before the first request."""
        inputs = self._inputs[_rounded(n, self._model.sizes)]
        inputs.fill_unreal(n, self._ready.vocab_size)
        if self._first_layers is not None:
            self._first_layers.fill_unreal(n)
        one = np.array([n, 0], np.int32)
        c = self._model.config
        tiles = prefill_tiles(
            one[1:], one[:1], one[1:], one[1:] + self._ready.max_num_seqs, c.num_heads, c.num_kv_heads
        )
        batch = self._batch(inputs, 0, torch.from_numpy(tiles).to(self._model.device), part)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            inputs.copy()
            self._model.begin(batch)
            self._model.forward(batch)
            self._done.wait()
            self._model.check()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan. The plan is the router's and trusted; any exception is fatal to the worker."""
        started = time.perf_counter()
        idle_ms = (started - self._step_ended) * 1e3
        for seq in plan.new_seqs:
            self._bind(seq)
        layout = Layout(plan.rows)
        inputs = self._inputs[_rounded(layout.n, self._model.sizes)]
        inputs.fill(layout, self._sequences)
        record = None if self._dump is None else self._dump.start(layout, self._sequences, self._ready)
        if self._first_layers is not None:
            self._first_layers.compute(layout, self._sequences, record)
        # A request that is new may read the KV of rows of this very step, beside its own.
        rows_independent = layout.n == 1 or (layout.n == len(layout.count) and not plan.new_seqs)
        has_logits = self._forward(inputs, layout, rows_independent, record)
        prompt_logprobs = self._prompt_logprobs(plan.rows, layout, inputs.size)
        # What prompts asked for has overwritten the logits of a recorded step.
        sampled = self._sample(layout, inputs, has_logits and not prompt_logprobs, record)
        if not sampled:
            self._done.wait()
        self._model.check()
        if record is not None:
            record.finish(sampled)
        self._step_ended = time.perf_counter()
        compute_ms = (self._step_ended - started) * 1e3
        return StepResult(plan.step, sampled, prompt_logprobs, compute_ms, idle_ms)

    def expert_use(self) -> ExpertUse:
        tokens = self._model.heat.cpu().numpy()
        on_gpu = self._model.on_gpu.numpy().astype(np.uint8)
        if self._first_layers is not None:
            heat = self._first_layers.heat
            tokens = np.concatenate([heat, tokens])
            on_gpu = np.concatenate([np.zeros_like(heat, np.uint8), on_gpu])
        layers, experts = tokens.shape
        return ExpertUse(layers, experts, self._ready.experts_per_token, tokens.tobytes(), on_gpu.tobytes())

    def step_bytes(self, plan: StepPlan) -> int:
        """Runs one plan and counts the bytes of weights that it had to read from the slower memory in use, each
        distinct expert once: from RAM where experts are there, else from the GPU's."""
        before = self._model.heat.clone()
        first, shared = self._first_layers, self._experts_in_ram
        first_before = 0 if first is None else first.weight_bytes_read()
        self.step(plan)
        used = (self._model.heat != before).cpu()
        if not self._has_experts_in_ram:
            return self._model.weight_bytes(used)
        of_first = 0 if first is None else first.weight_bytes_read() - first_before
        return of_first + (0 if shared is None else shared.bytes_of(used & ~self._model.on_gpu))

    def read_experts(self) -> tuple[float, int]:
        """That memory's speed: seconds and bytes of one plain read of all experts in RAM, or of a copy within the GPU's
        memory (1 GiB, best of four, read and written)."""
        if self._has_experts_in_ram:
            parts = (self._first_layers, self._experts_in_ram)
            reads = [part.read() for part in parts if part is not None]
            return sum(seconds for seconds, _ in reads), sum(nbytes for _, nbytes in reads)
        source = torch.empty(COPIED, dtype=torch.uint8, device=self._model.device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return min(seconds), 2 * COPIED

    @property
    def _has_experts_in_ram(self) -> bool:
        has_layers = self._first_layers is not None and self._first_layers.num_layers > 0
        return has_layers or self._experts_in_ram is not None

    def _bind(self, seq: NewSeq) -> None:
        tokens = self._sequences.bind(seq)
        log_bound(seq, len(tokens))
        prefix = (
            torch.frombuffer(bytearray(seq.prefix_slots), dtype=torch.int32) if seq.prefix_slots else None
        )
        if prefix is not None:
            self._slot_table[seq.req_slot, : len(prefix)].copy_(prefix)
        output = tokens[seq.num_prompt :]
        self._sampler.bind(seq.req_slot, seq.sampling, tokens[: seq.num_prompt], output)
        self._constraints.bind(seq.req_slot, seq.sampling, output)

    def _forward(
        self, inputs: StepInputs, layout: Layout, rows_independent: bool, record: StepRecord | None
    ) -> bool:
        """Launches the step; True where that included the head. A step that is dumped is never a recorded one."""
        each_alone = layout.n <= SMALL_BATCH_ROWS or layout.n == len(layout.count)
        graphs = self._decode if rows_independent else self._small_batches
        recorded = graphs.get(inputs.size) if each_alone and record is None else None
        if recorded is not None:
            self._model.begin()
            recorded()
            return True
        inputs.copy()
        num_decode = layout.n if each_alone else _leading_ones(layout.count)
        tiles = None if each_alone else self._tiles(layout, num_decode)
        streamed = 0.0 if tiles is None else self.streaming.part(layout.n)
        batch = self._batch(inputs, num_decode, tiles, streamed, rows_independent)
        self._model.begin(batch)
        self._model.forward(batch, record)
        return False

    def _decode_step(self, size: int, rows_independent: bool) -> None:
        """What is recorded: a step of `size` rows, each of which attends by itself, all sampled."""
        inputs = self._inputs[size]
        inputs.copy()
        self._model.forward(self._batch(inputs, size, None, 0.0, rows_independent))
        rows, _, count = inputs.head(0, size)
        self._logits[size] = self._model.logits(size, rows, count)

    def _batch(
        self,
        inputs: StepInputs,
        num_decode: int,
        tiles: Tensor | None,
        streamed: float,
        rows_independent: bool = False,
    ) -> GpuBatch:
        return GpuBatch(
            inputs.count,
            inputs.token_ids,
            inputs.positions,
            inputs.kv_slots,
            inputs.req_slots,
            num_decode,
            tiles,
            rows_independent,
            streamed,
        )

    def _tiles(self, layout: Layout, num_decode: int) -> Tensor:
        """Of the chunks behind the first `num_decode` rows."""
        c, chunks = self._model.config, slice(num_decode, None)
        tiles = prefill_tiles(
            layout.offset[chunks],
            layout.count[chunks],
            layout.start[chunks],
            layout.req_slot[chunks],
            c.num_heads,
            c.num_kv_heads,
        )
        return torch.from_numpy(tiles).to(self._model.device)

    def _sample(
        self, layout: Layout, inputs: StepInputs, has_logits: bool, record: StepRecord | None
    ) -> list[Sampled]:
        sampled: list[Sampled] = []
        most = self._model.head_sizes[-1]
        for call, first in enumerate(range(0, len(layout.sampled_rows), most)):
            part = slice(first, first + most)
            slots, positions = layout.sampled_slots[part], layout.sampled_positions[part]
            size = inputs.size if has_logits else _rounded(len(slots), self._model.head_sizes)
            rows, device_slots, count = inputs.head(call, size)
            logits = self._logits[size] if has_logits else self._model.logits(inputs.size, rows, count)
            if record is not None:
                record.logits(first, logits[: len(slots)])
            masks = self._constraints.masks_for(slots)
            chosen = self._sampler.sample(logits, slots, device_slots, count, masks)
            wanted = self._sampler.wanted_logprobs(slots)
            has_wanted = any(top is not None for top in wanted)
            scores = self._sampler.score(logits, chosen, count) if has_wanted else None
            tokens = self._done.read(chosen[: len(slots)])
            failed = self._constraints.accept(slots, tokens)
            self._sequences.append(slots, positions, tokens)
            logprobs = [None] * len(slots) if scores is None else scores.read(wanted)
            sampled += entries(tokens, logprobs, failed)
        return sampled

    def _prompt_logprobs(self, rows: list[Row], layout: Layout, size: int) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for span in self._sequences.prompt_spans(rows, layout, self._model.head_sizes[-1]):
            n, device = len(span.places), self._model.device
            padded = _rounded(n, self._model.head_sizes)
            places, targets = (_padded(ids, padded).to(device) for ids in (span.places, span.targets))
            count = torch.tensor([n], dtype=torch.int32, device=device)
            scores = self._sampler.score(self._model.logits(size, places, count), targets, count)
            entries = scores.read([span.top_n] * n)
            found.setdefault(span.row, []).extend(entry for entry in entries if entry is not None)
        return found


def _rounded(n: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= n)


def _leading_ones(counts: Int32s) -> int:
    longer = np.flatnonzero(counts > 1)
    return int(longer[0]) if len(longer) else len(counts)


def _padded(ids: Int32s, size: int) -> Tensor:
    out = torch.zeros(size, dtype=torch.int32)
    out[: len(ids)] = torch.from_numpy(np.ascontiguousarray(ids))
    return out
