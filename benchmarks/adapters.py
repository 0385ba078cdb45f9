"""Decode steps whose rows ask for LoRA adapters, and the same steps without: what adapters cost on the CPU.

    python -m benchmarks.header 12-layers.gguf --layers 12
    python -m benchmarks.adapters --model 12-layers.gguf [--adapters 8] [--batch 16] [--rank 16] [--experts]

Weights and adapters are random, of the file's shapes, and KV is made up. One engine does both, a few steps of either,
which of them first in turn, so that what else the machine does meets both alike. The adapters change attention and the
routers; with --experts the routed experts too. Printed: milliseconds a step, and the median of the ratios with its 90%
interval by bootstrap.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

from benchmarks.paired import median_interval
from moeserve.adapters.adapter import Adapter, LowRank, ProductKey
from moeserve.adapters.products import products_of
from moeserve.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.models.interface import ModelShape
from moeserve.worker.loading import build_cpu_runner, load_cpu_model
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s

STEPS = 3  # of a turn
CONTEXT = 256


def random_adapter(name: str, shape: ModelShape, rank: int, *, experts: bool) -> Adapter:
    random = np.random.default_rng(len(name))
    products = {}
    for layer in range(shape.num_layers):
        for part, product in products_of(shape, layer).items():
            if product.is_routed and not experts:
                continue
            for expert in range(product.experts):
                a = random.normal(scale=0.01, size=(rank, product.cols)).astype(np.float32)
                b = random.normal(scale=0.01, size=(product.rows, rank)).astype(np.float32)
                products[ProductKey(layer, part, expert)] = LowRank(
                    a * np.float32(0.01), b * np.float32(0.01)
                )
    return Adapter(name, name, products)


class Decoder:
    """Sequences of one runner that decode side by side."""

    def __init__(self, runner: Runner, first_seq: int, adapters: list[str]) -> None:
        """adapters: of each sequence; "": none."""
        self._runner = runner
        self._seqs = range(first_seq, first_seq + len(adapters))
        self._position = CONTEXT
        self._step = 0
        random = np.random.default_rng(0)  # tokens that differ by row, so that rows have experts of their own
        self._run(
            [
                NewSeq(
                    seq,
                    random.integers(0, 100_000, CONTEXT + 1, np.int32).tobytes(),
                    CONTEXT + 1,
                    self._slots(seq, 0, CONTEXT).tobytes(),
                    SamplingParams(max_tokens=1 << 20, temperature=1.0, seed=seq - first_seq),
                    adapter=adapter,
                )
                for seq, adapter in zip(self._seqs, adapters, strict=True)
            ]
        )

    def seconds(self) -> float:
        """Of STEPS steps."""
        began = time.perf_counter()
        for _ in range(STEPS):
            self._run([])
        return time.perf_counter() - began

    def _slots(self, seq: int, start: int, count: int) -> Int32s:
        length = self._runner.ready().max_model_len
        return np.arange(seq * length + start, seq * length + start + count, dtype=np.int32)

    def _run(self, new: list[NewSeq]) -> None:
        at = self._position
        rows = [Row(seq, at, 1, self._slots(seq, at, 1).tobytes(), True) for seq in self._seqs]
        self._runner.step(StepPlan(self._step, new, rows))
        self._position += 1
        self._step += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or the header of one")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--experts", action="store_true", help="adapters of the routed experts, too")
    args = parser.parse_args()
    length = CONTEXT + STEPS * (args.rounds + 1) + 2
    config = ServerConfig(
        model=str(args.model),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2 * args.batch,
        max_model_len=length,
        max_total_tokens=2 * args.batch * length,
    )
    model = load_cpu_model(resolve(config), lambda *_: None)
    names = [f"adapter-{'x' * number}" for number in range(args.adapters)]
    made = [random_adapter(name, model.shape, args.rank, experts=args.experts) for name in names]
    runner = build_cpu_runner(dataclasses.replace(model, adapters=made))
    decoders = {
        "without": Decoder(runner, 0, [""] * args.batch),
        "with": Decoder(runner, args.batch, [names[row % len(names)] for row in range(args.batch)]),
    }
    took: dict[str, list[float]] = {name: [] for name in decoders}
    for number in range(args.rounds):
        for name in decoders if number % 2 == 0 else reversed(list(decoders)):
            took[name].append(decoders[name].seconds())
    for name, seconds in took.items():
        steps = np.array(seconds) / STEPS * 1e3
        print(f"{name:<8} {np.median(steps):.1f} ms a step (quickest {steps.min():.1f})")
    ratios = [a / b for a, b in zip(took["with"], took["without"], strict=True)]
    median, low, high = median_interval(ratios)
    print(f"with / without: {median:.3f} (90% of the median {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
