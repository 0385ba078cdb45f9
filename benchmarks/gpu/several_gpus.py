"""The engine on several GPUs, and on one: Qwen3-30B-A3B's shape with random weights (Q4_K_M mix).

    python -m benchmarks.gpu.several_gpus [--gpus 1 2:tensor 2:layers] [--layers 48] [--batch 1,8,64,256]
        [--prompt 8192] [--shape 30b] [--num-gpu-experts N] [--expert-cache off] [--max-num-batched-tokens N]

Tokens a second of decode steps by streams, and of a prompt, each number of GPUs (and way of division) in a process of
its own. The shapes are Qwen3-30B-A3B's and Qwen3-235B-A22B's.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.models.interface import ModelShape
from moeserve.worker.loading.load import load_runner
from tests.support.models.model_header import qwen3moe, write_header

CONTEXT = 128  # tokens of a stream before it decodes
STEPS = 32


SHAPES: dict[str, Callable[..., ModelShape]] = {
    "30b": qwen3moe,
    "235b": partial(
        qwen3moe, hidden_size=4096, num_layers=94, num_heads=64, num_kv_heads=4, expert_width=1536
    ),
}


def measure(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO)  # which sums are fastest, and how many parts
    gpus, _, parallel = args.gpus[0].partition(":")
    batches, prompt = [int(n) for n in args.batch.split(",")], args.prompt
    config = ServerConfig(
        model=str(args.model), load_format="dummy", device="cuda", gpus=gpus, parallel=parallel or "auto",
        num_gpu_experts=args.num_gpu_experts, expert_cache=args.expert_cache, max_num_seqs=max(batches),
        max_model_len=prompt + 16,
        max_total_tokens=max(prompt + 16, max(batches) * (CONTEXT + 2 * STEPS)),
        max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip
    gpus = args.gpus[0]
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
    parser.add_argument("--gpus", nargs="+", default=["1", "2:tensor", "2:layers"])
    parser.add_argument("--shape", choices=SHAPES, default="30b")
    parser.add_argument("--layers", type=int, help="default: all of the shape's")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--num-gpu-experts", type=int)
    parser.add_argument("--expert-cache", choices=("auto", "off"), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # of the processes
    args = parser.parse_args()
    if args.model is not None:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        shape = SHAPES[args.shape]
        write_header(model, shape() if args.layers is None else shape(num_layers=args.layers))
        given = sys.argv[1:]
        if "--gpus" in given:
            at = given.index("--gpus")
            given = given[:at] + given[at + 1 + len(args.gpus) :]
        for gpus in args.gpus:
            command = [sys.executable, "-m", "benchmarks.gpu.several_gpus", *given]
            subprocess.run([*command, "--gpus", gpus, "--model", str(model)], check=False)


if __name__ == "__main__":
    main()
