"""Decode steps at a long context on the CPU, with float16 KV and with q8_0 in turn: what --kv-cache-dtype gives.

    python -m benchmarks.header 12-layers.gguf --layers 12
    python -m benchmarks.kv_dtypes --model 12-layers.gguf [--context 32000] [--batch 1] [--rounds 20]

Weights are random, of the file's shapes and types, and both engines share them; KV is random too, so that nothing is
prefilled. A round is a few steps of either kind, which of them first in turn, so that what else the machine does meets
both alike. Printed: milliseconds a step, and the median of the ratios with its 90% interval by bootstrap.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.paired import median_interval
from moeserve.config import ServerConfig
from moeserve.kv.layout import KV_BLOCK
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import NewSeq, Row, StepPlan
from moeserve.options import resolve
from moeserve.worker.engines.cpu import CpuEngine
from moeserve.worker.loading import CpuModel, build_cpu_runner, load_cpu_model

STEPS = 3  # of a turn


class Decoder:
    """An engine with random KV of one type, whose sequences all have `context` tokens."""

    def __init__(self, model: CpuModel, kv_cache_dtype: str, batch: int, context: int) -> None:
        self._runner = build_cpu_runner(
            dataclasses.replace(
                model, config=dataclasses.replace(model.config, kv_cache_dtype=kv_cache_dtype)
            )
        )
        engine = self._runner.engine
        assert isinstance(engine, CpuEngine)
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
        """Of STEPS steps."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or the header of one")
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    length = args.context + STEPS * (args.rounds + 1) + 2
    config = ServerConfig(
        model=str(args.model),
        load_format="dummy",
        device="cpu",
        max_num_seqs=args.batch,
        max_model_len=length,
        max_total_tokens=args.batch * length,
    )
    model = load_cpu_model(resolve(config), lambda *_: None)
    f16, q8_0 = (Decoder(model, name, args.batch, args.context) for name in ("f16", "q8_0"))
    took: dict[Decoder, list[float]] = {f16: [], q8_0: []}
    for number in range(args.rounds):
        for decoder in (f16, q8_0) if number % 2 == 0 else (q8_0, f16):
            took[decoder].append(decoder.seconds())
    for name, decoder in (("f16", f16), ("q8_0", q8_0)):
        steps = np.array(took[decoder]) / STEPS * 1e3
        print(f"{name:<5} {np.median(steps):.1f} ms a step (quickest {steps.min():.1f})")
    ratios = [a / b for a, b in zip(took[f16], took[q8_0], strict=True)]
    median, low, high = median_interval(ratios)
    print(f"f16 / q8_0: {median:.3f} (90% of the median {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
