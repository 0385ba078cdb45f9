"""The speed of this machine: measured with the engine's own kernels in about a second, or as the user states it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.command_line import demonstration_model
from moeserve.cli.plan.rates import CpuRates
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.speed import CpuSpeed, Step
from moeserve.config import ServerConfig
from moeserve.config.engine_config import MEASURED
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from moeserve.kernels.stream_operands import Activations, RoutingWorkspace
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import ModelShape
from moeserve.models.loading.engine_types import check_cpu_types
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import dense_tensors
from moeserve.placement import ModelSizes
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.quantization import QuantType
from moeserve.quantization.table import Q8_0
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.cpu.thread_placement import place_threads

READ_BYTES = 512 << 20  # at least, and also
READ_CACHES = 4  # times the last-level cache: a cache of 300 MiB would serve half of 512 MiB
TOKENS = 256  # in a measured product; with more the rate hardly grows
SAMPLE_EXPERTS = 16  # enough for as many tokens per expert as in a full prefill step
SECONDS = 0.15  # spent on each figure
ROWS, PROMPT, POSITIONS = 16, 16, 256  # steps of the packaged model
MOST_STEPS = 100  # at most, so that the context stays short


def measure(config: ServerConfig, gguf: ModelSource, model: ModelShape) -> CpuRates:
    """Measures and returns the CPU's rates: bytes read and operations computed per second, fixed seconds per operation,
    row and step, and the size of the last-level cache. config: threads, isa and places are the server's. Raises
    ModelError for a type without CPU kernels."""
    check_cpu_types(gguf, [_dense_name(model), *_expert_names(model)])
    steps = _packaged_steps(config)  # first, because it refuses an unsupported --isa
    stream = CpuStream(
        place_threads(config.threads or 1, config.numa_nodes, config.cpu_binding),
        "" if config.isa in MEASURED else config.isa,
    )
    rates = CpuRates(
        read=_read_rate(stream),
        dense_ops=_dense_rate(stream, gguf, model),
        expert_ops=_expert_rate(stream, gguf, model),
        op_s=_operation_seconds(stream),
        cache_bytes=_last_level_cache(),
    )
    one, many = (seconds - _explained(rates, rows) for rows, seconds in steps.items())
    row_s = max(0.0, (many - one) / (ROWS - 1))
    return dataclasses.replace(rates, step_s=max(0.0, one - row_s), row_s=row_s)


def _packaged_steps(config: ServerConfig) -> dict[int, float]:
    """Returns the seconds of the packaged model's decode steps, by their rows. They compute next to nothing, so they
    measure the runner around them."""
    small = dataclasses.replace(
        config,
        model=str(demonstration_model()),
        load_format="auto",
        lora_modules=(),
        lora_dir=None,
        speculative_config=None,
        speculative_model=None,
        kv_cache_dtype="auto",
        max_num_seqs=ROWS,
        max_model_len=POSITIONS,
        max_total_tokens=ROWS * POSITIONS,
        num_gpu_experts=None,
        gpu_memory_budget=None,
        unpacked_experts=0.0,
        expert_heat=None,
        placement_rules=None,
        n_gpu_layers=None,
    )
    bench = EngineBench(
        load_cpu_runner(small, lambda stage, done, total: None), step_tokens=64, temperature=1.0
    )

    def seconds(rows: int) -> float:
        bench.prefill(rows, PROMPT)
        positions = iter(range(PROMPT, POSITIONS))
        return _seconds(lambda: bench.decode(rows, next(positions), 1), most=MOST_STEPS)

    return {rows: seconds(rows) for rows in (1, ROWS)}


def _explained(rates: CpuRates, rows: int) -> float:
    """Returns the part of a packaged model's step that its products, attention and operations explain, in seconds."""
    gguf = open_model(demonstration_model())
    model = read_checked_shape(gguf)
    speed = CpuSpeed(model, ModelSizes.of(gguf.tensors, KvLayout(model)), RoutingProbabilities(model), rates)
    return speed.seconds(Step(rows, 1, PROMPT + MOST_STEPS // 2))


def _last_level_cache() -> int:
    """Returns the bytes of the first CPU's last-level cache; 0 if sysfs does not have it."""
    sizes = [0]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def _read_rate(stream: CpuStream) -> float:
    cols = 4096
    wanted = max(READ_BYTES, READ_CACHES * _last_level_cache())
    nbytes = min(
        wanted, available_bytes() // 2
    )  # more than a control group's limit would get this process killed
    matrix = _zeros(stream, Q8_0, (nbytes // Q8_0.row_bytes(cols), cols))

    def read() -> None:
        stream.read(matrix)
        stream.wait()

    return matrix.bytes / _seconds(read)


def _dense_name(model: ModelShape) -> str:
    """Returns the name of the first matrix of the first layer."""
    return next(name for name, shape in dense_tensors(model, 0).items() if len(shape) == 2)


def _dense_rate(stream: CpuStream, gguf: ModelSource, model: ModelShape) -> float:
    tensor = gguf.tensors[_dense_name(model)]
    matrix = _zeros(stream, tensor.type, tensor.shape)
    x = Activations(TOKENS, matrix.cols)
    _clear(x)
    out = torch.zeros(TOKENS, matrix.rows)

    def multiply() -> None:
        stream.linear(x, TOKENS, LinearGroup([matrix]), [out])
        stream.wait()

    return 2.0 * TOKENS * matrix.rows * matrix.cols / _seconds(multiply)


def _expert_names(model: ModelShape) -> tuple[str, ...]:
    """Returns the names of the matrices of a layer's experts; in a model without experts, those of a feed-forward."""
    if model.moe_layers:
        layer = model.moe_layers[0]
    else:
        layer = next(index for index, each in enumerate(model.layers) if each.ffn is not None)
    ffn = model.layers[layer].ffn
    assert ffn is not None
    return tuple(n.of_layer(layer, part) for part in ffn.parts)


def _expert_rate(stream: CpuStream, gguf: ModelSource, model: ModelShape) -> float:
    all_experts = max(1, model.num_experts)
    experts = min(SAMPLE_EXPERTS, all_experts)
    top_k = min(max(1, model.top_k), experts)
    parts = [gguf.tensors[name] for name in _expert_names(model)]
    gate, up, down = (_zeros(stream, t.type, (experts, *t.shape[-2:])) for t in parts)
    # Widths in the first such layer; others may be wider. Latent experts' input is narrower than the model.
    width, outer = parts[0].shape[-2:]
    tokens = max(1, TOKENS * experts // all_experts)  # as many per expert as in a step
    y, h = Activations(tokens, outer), Activations(tokens * top_k, width)
    _clear(y)
    workspace = RoutingWorkspace(tokens, experts, top_k)
    workspace.ids[:] = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts
    workspace.weights.fill_(1 / top_k)
    expert_token_counts, out = (
        torch.zeros(2, experts, dtype=torch.int64),
        torch.zeros(tokens, outer),
    )

    def compute() -> None:
        stream.experts(gate, up, down, y, tokens, workspace, h, expert_token_counts, out)
        stream.wait()

    return 6.0 * tokens * top_k * outer * width / _seconds(compute)


def _operation_seconds(stream: CpuStream) -> float:
    x, y, ones = torch.zeros(1, 32), Activations(1, 32), torch.ones(32)
    count = 90

    def queue() -> None:
        for _ in range(count):
            stream.norm(x, ones, 1e-6, 1, y)
        stream.wait()

    return _seconds(queue) / count


def _zeros(stream: CpuStream, kind: QuantType, shape: tuple[int, ...]) -> Matrix:
    """Returns a matrix of zeros whose source takes no memory. Raises ConfigError if its type has no packed form."""
    rows = int(np.prod(shape[:-1]))
    nbytes, free = rows * kind.row_bytes(shape[-1]), available_bytes()
    if nbytes > free:
        raise ConfigError(
            f"measuring this machine takes {nbytes / GIB:.2f} GiB of memory and {free / GIB:.2f} GiB are "
            f"free{limit_note()}; free some, or give the rates (--cpu-bandwidth, --cpu-gops)"
        )
    return stream.pack(np.zeros(nbytes, np.uint8), int(kind), shape)


def _clear(x: Activations) -> None:
    x.f32.zero_()
    x.q8.zero_()


def _seconds(work: Callable[[], object], most: int = 1000) -> float:
    """Returns the median time of as many calls as fit into SECONDS, after one warm-up call."""
    work()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end and len(times) < most:
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
