"""How fast this machine is, measured with the engine's own kernels in about a second; or as the user says."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from moeserve.bench.engine import EngineBench
from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import Activations, CpuStream, LinearGroup, Matrix, RoutingRoom
from moeserve.models.gguf import names as n
from moeserve.models.gguf.quant_types import QUANT_TYPES
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.source import ModelSource, open_model
from moeserve.options import demonstration_model
from moeserve.worker.loading import load_runner
from moeserve.worker.places import plan_places

READ_BYTES = 512 << 20  # more than any last-level cache holds
TOKENS = 256  # of a product that is measured; beyond it the rate hardly grows
SAMPLE_EXPERTS = 16  # enough to have as many tokens an expert as a full prefill step has
SECONDS = 0.15  # for each figure
OPS_A_LAYER = 9
ROWS, POSITIONS = 16, 512  # of the packaged model's steps


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Of all threads together."""

    read: float  # bytes a second, of weights that are read and nothing else
    dense_ops: float  # multiplications and additions a second, of a matrix with many tokens
    expert_ops: float  # the same of routed experts
    op_s: float  # of an operation that has next to nothing to do
    step_s: float  # what a step takes beside its operations
    row_s: float  # and each row that samples, without a vocabulary to speak of


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a plan assumes of a GPU. The defaults are a middling one's; say what yours has."""

    read: float = 900e9  # bytes a second
    ops: float = 150e12  # bf16
    pcie: float = 25e9  # bytes a second, from RAM


def measure(config: ServerConfig, gguf: ModelSource, model: Qwen3MoeConfig) -> CpuRates:
    """config: threads, isa and places are the server's."""
    step_s, row_s = _step_seconds(config)  # first: it refuses an --isa that is not there
    stream = CpuStream(
        plan_places(config.threads or 1, config.numa_nodes, config.cpu_binding),
        "" if config.isa == "auto" else config.isa,
    )
    op_s = _operation_seconds(stream)
    layers = Qwen3MoeConfig.from_gguf(open_model(demonstration_model())).num_layers
    return CpuRates(
        read=_read_rate(stream),
        dense_ops=_dense_rate(stream, gguf),
        expert_ops=_expert_rate(stream, gguf, model),
        op_s=op_s,
        step_s=max(0.0, step_s - layers * OPS_A_LAYER * op_s),
        row_s=row_s,
    )


def _read_rate(stream: CpuStream) -> float:
    cols = 4096
    matrix = _zeros(stream, GGMLQuantizationType.Q8_0, (READ_BYTES // 34 * 32 // cols, cols))

    def read() -> None:
        stream.read(matrix)
        stream.wait()

    return matrix.bytes / _seconds(read)


def _dense_rate(stream: CpuStream, gguf: ModelSource) -> float:
    tensor = gguf.tensors[n.of_layer(0, n.ATTN_Q)]
    matrix = _zeros(stream, int(tensor.type), tensor.shape)
    x = Activations(TOKENS, matrix.cols)
    _clear(x)
    out = torch.zeros(TOKENS, matrix.rows)

    def multiply() -> None:
        stream.linear(x, TOKENS, LinearGroup([matrix]), [out])
        stream.wait()

    return 2.0 * TOKENS * matrix.rows * matrix.cols / _seconds(multiply)


def _expert_rate(stream: CpuStream, gguf: ModelSource, model: Qwen3MoeConfig) -> float:
    experts = min(SAMPLE_EXPERTS, model.num_experts)
    top_k = min(model.top_k, experts)
    parts = [gguf.tensors[n.of_layer(0, p)] for p in (n.FFN_GATE_EXPS, n.FFN_UP_EXPS, n.FFN_DOWN_EXPS)]
    gate, up, down = (_zeros(stream, int(t.type), (experts, *t.shape[1:])) for t in parts)
    tokens = max(1, TOKENS * experts // model.num_experts)  # as many for each expert as a step has
    y, h = Activations(tokens, model.hidden_size), Activations(tokens * top_k, model.expert_ff)
    _clear(y)
    room = RoutingRoom(tokens, experts, top_k)
    room.ids[:] = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts
    room.weights.fill_(1 / top_k)
    heat, out = torch.zeros(2, experts, dtype=torch.int64), torch.zeros(tokens, model.hidden_size)

    def compute() -> None:
        stream.experts(gate, up, down, y, tokens, room, h, heat, out)
        stream.wait()

    return 6.0 * tokens * top_k * model.hidden_size * model.expert_ff / _seconds(compute)


def _step_seconds(config: ServerConfig) -> tuple[float, float]:
    """Of the packaged model's decode step, which has next to nothing to compute, with the real runner around it; and
    of each further row."""
    small = dataclasses.replace(
        config,
        model=str(demonstration_model()),
        max_num_seqs=ROWS,
        max_model_len=POSITIONS,
        max_total_tokens=ROWS * POSITIONS,
        num_gpu_experts=None,
        gpu_memory_budget=None,
        expert_heat=None,
        placement_rules=None,
        n_gpu_layers=None,
    )
    bench = EngineBench(load_runner(small, lambda stage, done, total: None), step_tokens=64)

    def seconds(batch: int) -> float:
        bench.prefill(batch, 16)
        positions = iter(range(16, POSITIONS))
        return _seconds(lambda: bench.decode(batch, next(positions), 1), most=POSITIONS - 32)

    one = seconds(1)
    row_s = max(0.0, (seconds(ROWS) - one) / (ROWS - 1))
    return one - row_s, row_s


def _operation_seconds(stream: CpuStream) -> float:
    x, y, ones = torch.zeros(1, 32), Activations(1, 32), torch.ones(32)
    count = 90

    def queue() -> None:
        for _ in range(count):
            stream.norm(x, ones, 1e-6, 1, y)
        stream.wait()

    return _seconds(queue) / count


def _zeros(stream: CpuStream, ggml_type: int, shape: tuple[int, ...]) -> Matrix:
    """A matrix whose source takes no memory."""
    quant = QUANT_TYPES[GGMLQuantizationType(ggml_type)]
    rows = int(np.prod(shape[:-1]))
    return stream.pack(np.zeros(rows * quant.row_bytes(shape[-1]), np.uint8), ggml_type, shape)


def _clear(x: Activations) -> None:
    x.f32.zero_()
    x.q8.zero_()


def _seconds(work: Callable[[], None], most: int = 1000) -> float:
    """The median of the calls that SECONDS are enough for, after one that warms up."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end and len(times) < most:
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
