"""Decode steps whose rows ask for LoRA adapters, and the same steps without: what adapters cost.

    python -m benchmarks.header 12-layers.gguf --layers 12
    python -m benchmarks.adapters --model 12-layers.gguf [--device cpu] [--adapters 8] [--batch 16] [--rank 16]
        [--change attention router experts]

Weights and adapters are random, of the file's shapes, and KV is made up. One engine does both, a few steps of either,
which of them first in turn, so that what else the machine does meets both alike. The adapters change attention and the
routers, or what --change says. Printed: milliseconds a step, and the median of the ratios with its 90% interval by
bootstrap.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.paired import median_interval
from benchmarks.random_adapters import write_random_adapter
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s

CONTEXT = 256
KINDS = {
    "attention": (*QKV_PARTS, n.ATTN_OUTPUT),
    "router": (n.FFN_GATE_INP,),
    "experts": n.EXPERT_PARTS,
}


class Decoder:
    """Sequences of one runner that decode side by side."""

    def __init__(self, runner: Runner, first_seq: int, adapters: list[str], steps: int) -> None:
        """adapters: the key of each sequence's; "": none. steps: of a turn."""
        self._runner = runner
        self._steps = steps
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
        """Of a turn."""
        began = time.perf_counter()
        for _ in range(self._steps):
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
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--change", nargs="+", choices=KINDS, default=["attention", "router"])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    parts = [part for kind in args.change for part in KINDS[kind]]
    shape = read_shape(open_dummy_model(args.model))
    names = [f"adapter-{number}" for number in range(args.adapters)]
    length = CONTEXT + args.steps * (args.rounds + 1) + 2
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in names]
        for seed, path in enumerate(paths):
            write_random_adapter(path, shape, args.rank, seed, parts=parts, size=0.01)
        config = ServerConfig(
            model=str(args.model),
            load_format="dummy",
            device=args.device,
            max_num_seqs=2 * args.batch,
            max_model_len=length,
            max_total_tokens=2 * args.batch * length,
            max_num_batched_tokens=512,
            lora_modules=tuple(f"{path.name}={path}" for path in paths),
        )
        runner = load_runner(resolve(config), lambda *_: None)
    print(f"{', '.join(args.change)}: {args.adapters} of rank {args.rank}, {runner.ready().device}")
    keys = [runner.ready().adapters[names[row % len(names)]] for row in range(args.batch)]
    decoders = {
        "without": Decoder(runner, 0, [""] * args.batch, args.steps),
        "with": Decoder(runner, args.batch, keys, args.steps),
    }
    took: dict[str, list[float]] = {name: [] for name in decoders}
    for number in range(args.rounds):
        for name in decoders if number % 2 == 0 else reversed(list(decoders)):
            took[name].append(decoders[name].seconds())
    for name, seconds in took.items():
        steps = np.array(seconds) / args.steps * 1e3
        print(f"{name:<8} {np.median(steps):.2f} ms a step (quickest {steps.min():.2f})")
    ratios = [a / b for a, b in zip(took["with"], took["without"], strict=True)]
    median, low, high = median_interval(ratios)
    print(f"with / without: {median:.3f} (90% of the median {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
