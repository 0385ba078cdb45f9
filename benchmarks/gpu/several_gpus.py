"""The engine on several GPUs, and on one: Qwen3-30B-A3B's shape with random weights (Q4_K_M mix).

    python -m benchmarks.gpu.several_gpus [--gpus 1 2] [--layers 48] [--batch 1,8,64,256] [--prompt 8192]

Tokens a second of decode steps by streams, and of a prompt, each number of GPUs in a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.header import qwen3moe, write_header
from moeserve.bench.engine import EngineBench
from moeserve.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.worker.loading import load_runner

CONTEXT = 128  # tokens of a stream before it decodes
STEPS = 32


def measure(gpus: str, model: Path, batches: list[int], prompt: int) -> None:
    logging.basicConfig(level=logging.INFO)  # which sums are fastest
    config = ServerConfig(
        model=str(model), load_format="dummy", device="cuda", gpus=gpus, max_num_seqs=max(batches),
        max_model_len=prompt + 16, max_total_tokens=max(prompt + 16, max(batches) * (CONTEXT + 2 * STEPS)),
    )  # fmt: skip
    began = time.perf_counter()
    runner = load_runner(resolve(config), lambda *_: None)
    print(f"{gpus}: ready in {time.perf_counter() - began:.1f} s, {runner.ready().device}", flush=True)
    bench = EngineBench(runner, runner.ready().max_num_batched_tokens, temperature=1.0)
    bench.prefill(1, prompt)
    seconds = min(bench.prefill(1, prompt) for _ in range(3))
    print(f"{gpus}: prefill of {prompt}: {prompt / seconds:.0f} tok/s", flush=True)
    for batch in batches:
        bench.prefill(batch, CONTEXT)
        bench.decode(batch, CONTEXT, 4)
        seconds = bench.decode(batch, CONTEXT + 4, STEPS)
        each = seconds / STEPS * 1e3
        print(
            f"{gpus}: {batch} streams: {batch * STEPS / seconds:.0f} tok/s, {each:.2f} ms a step", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", nargs="+", default=["1", "2"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # of the processes
    args = parser.parse_args()
    if args.model is not None:
        measure(args.gpus[0], args.model, [int(n) for n in args.batch.split(",")], args.prompt)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_header(model, qwen3moe(num_layers=args.layers))
        for gpus in args.gpus:
            own = ["--gpus", gpus, "--model", str(model), "--batch", args.batch, "--prompt", str(args.prompt)]
            subprocess.run([sys.executable, "-m", "benchmarks.gpu.several_gpus", *own], check=False)


if __name__ == "__main__":
    main()
