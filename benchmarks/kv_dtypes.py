"""Decode steps at a long context, with float16 KV and with q8_0: what --kv-cache-dtype gives.

    python -m benchmarks.family_file 12-layers.gguf --shape qwen3-30b-a3b --layers 12
    python -m benchmarks.kv_dtypes --model 12-layers.gguf [--context 32000] [--batch 1] [--rounds 20]
    python -m benchmarks.kv_dtypes --model 48-layers.gguf --device cuda --batch 8
    python -m benchmarks.kv_dtypes --chosen-keys glm-5      attention to the keys that an indexer chooses, and to all

Weights are random, of the file's shapes and types, and KV is made up, so that nothing is prefilled. On the CPU both
engines share the weights, and a round is a few steps of either, which of them first in turn, so that what else the
machine does meets both alike. On a GPU one engine runs after the other. Printed: milliseconds a step, and the median of
the ratios with its 90% interval by bootstrap.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.paired import median_interval
from benchmarks.sparse_attention import SHAPES, print_ratio
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.kv.layout import KV_BLOCK
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner, load_cpu_model
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner

TYPES = ("f16", "q8_0")
STEPS = 3  # of a turn


class Decoder:
    """A runner with made-up KV, whose sequences all have `context` tokens."""

    def __init__(self, runner: Runner, batch: int, context: int) -> None:
        self._runner = runner
        engine = runner.engine
        assert isinstance(engine, (CpuEngine, GpuEngine))
        for layer in engine._model._kv:
            for tensor in layer.tensors:
                _fill(tensor)
        self._batch = batch
        self._position = context
        self._step = 0
        slots = np.arange(batch * context, dtype=np.int32).reshape(batch, context)
        tokens = np.zeros(context + 1, np.int32).tobytes()
        sampling = SamplingParams(max_tokens=1 << 20, temperature=1.0)
        new = [NewSeq(seq, tokens, context + 1, slots[seq].tobytes(), sampling) for seq in range(batch)]
        self._run(new)

    def seconds(self) -> float:
        """The time that STEPS steps take."""
        began = time.perf_counter()
        for _ in range(STEPS):
            self._run([])
        return time.perf_counter() - began

    def _run(self, new: list[NewSeq]) -> None:
        free = self._runner.ready().num_kv_slots - self._batch  # behind all contexts, and used again
        rows = [
            Row(seq, self._position, 1, np.int32(free + seq).tobytes(), True) for seq in range(self._batch)
        ]
        self._runner.step(StepPlan(self._step, new, rows))
        self._position += 1
        self._step += 1


def _fill(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.int8:
        tensor.random_(-127, 128)
    elif tensor.shape[-1] < KV_BLOCK:  # scales
        tensor.fill_(0.01)
    else:
        tensor.normal_()


def on_the_cpu(config: ServerConfig, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn, by the KV's type."""
    model = load_cpu_model(config, lambda *_: None)
    decoders = {}
    for name in TYPES:
        config = dataclasses.replace(model.config, kv_cache_dtype=name)
        runner = build_cpu_runner(dataclasses.replace(model, config=config))
        decoders[name] = Decoder(runner, args.batch, args.context)
    took: dict[str, list[float]] = {name: [] for name in TYPES}
    for number in range(args.rounds):
        for name in TYPES if number % 2 == 0 else reversed(TYPES):
            took[name].append(decoders[name].seconds())
    return took


def on_the_gpu(config: ServerConfig, args: argparse.Namespace) -> dict[str, list[float]]:
    """The same."""
    took = {}
    for name in TYPES:
        decoder = Decoder(
            load_runner(dataclasses.replace(config, kv_cache_dtype=name), lambda *_: None),
            args.batch,
            args.context,
        )
        took[name] = [decoder.seconds() for _ in range(args.rounds)]
        del decoder
        gc.collect()
        torch.cuda.empty_cache()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="a GGUF file, or the header of one")
    what.add_argument("--chosen-keys", choices=SHAPES, help="sparse_attention.py, in place of the KV's types")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="of --chosen-keys")
    args = parser.parse_args()
    if args.chosen_keys:
        print_ratio(args.chosen_keys, args.context, args.rounds, args.threads)
        return
    length = args.context + STEPS * (args.rounds + 1) + 2
    config = ServerConfig(
        model=str(args.model),
        load_format="dummy",
        device=args.device,
        max_num_seqs=args.batch,
        max_model_len=length,
        max_total_tokens=args.batch * length,
    )
    took = (on_the_gpu if args.device == "cuda" else on_the_cpu)(resolve(config), args)
    for name, seconds in took.items():
        steps = np.array(seconds) / STEPS * 1e3
        print(f"{name:<5} {np.median(steps):.1f} ms a step (quickest {steps.min():.1f})")
    ratios = [a / b for a, b in zip(took["f16"], took["q8_0"], strict=True)]
    median, low, high = median_interval(ratios)
    print(f"f16 / q8_0: {median:.3f} (90% of the median {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
