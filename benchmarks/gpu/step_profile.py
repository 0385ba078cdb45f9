"""The kernels of decode steps in CUDA graphs, by CUPTI: name, grid, launches of a step, microseconds each.

    python -m benchmarks.gpu.step_profile 30b.gguf --rows 1,64,256      # a header suffices: family_file
    python -m benchmarks.gpu.step_profile 30b.gguf --chunks 256,512,1024 --rows 16 --context 4000
    python -m benchmarks.gpu.step_profile gpt-oss.gguf --chunks 0 --rows 1,8 --context 64 --weights
    python -m benchmarks.gpu.step_profile qwen3.6.gguf --drafts 3   # by the model's own block: draft_step.py

Kernels are launched one after another, without programmatic dependent launch: with it a kernel's time holds its wait
for the one before. With --chunks, of prompt tokens beside the decode rows, they are launched as a server launches them
(`mixed_steps.py`).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.mixed_steps import profile_mixed
from benchmarks.gpu.traced import trace
from moeserve.kernels import launch

STEPS = 3
LINES = 26


def profile(step: Callable[[], object]) -> dict[tuple[str, tuple[int, ...]], list[float]]:
    """Microseconds of each launch of STEPS steps, by kernel and grid."""
    found: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for event in trace([step] * STEPS):
        found[event.name[:48], event.grid].append(event.end - event.start)
    return found


def report(rows: int, seconds: float, found: dict[tuple[str, tuple[int, ...]], list[float]]) -> None:
    whole = sum(map(sum, found.values())) / STEPS
    print(
        f"{rows} rows: {seconds * 1e3:.2f} ms a step, {rows / seconds:.0f} tok/s; kernels {whole / 1e3:.2f} ms"
    )
    for (name, grid), times in sorted(found.items(), key=lambda item: -sum(item[1]))[:LINES]:
        print(
            f"    {name:<48} {grid!s:<16} {len(times) / STEPS:6.1f} x {sum(times) / len(times):7.1f} us "
            f"= {sum(times) / STEPS / 1e3:6.2f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,64,128,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--pdl", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--chunks", help="prompt tokens of a step beside the rows; 0: decode rows alone")
    parser.add_argument("--weights", action="store_true", help="with --chunks: the file has weights")
    parser.add_argument("--drafts", type=int, help="what a step with this number of drafts is made of")
    options = parser.parse_args()
    if options.drafts is not None:
        from benchmarks.gpu.draft_step import profile_drafts  # kernels as a server launches them

        profile_drafts(options.model, options.drafts)
        return
    if options.chunks is not None:
        beside = [int(part) for part in options.rows.split(",")]
        chunks = [int(part) for part in options.chunks.split(",") if part != "0"]
        profile_mixed(options.model, beside, chunks, options.context, options.weights)
        return
    if not options.pdl:
        launch.PDL = False
    from moeserve.cli.bench import engine as bench
    from moeserve.worker.loading.load import load_runner

    batches = [int(rows) for rows in options.rows.split(",")]
    arguments = [
        "--model", options.model, "--load-format", "dummy", "--device", "cuda", "--batch", options.rows,
        "--prompt", str(options.context), "--gen", "64", "--max-num-batched-tokens", "512",
    ]  # fmt: skip
    began = time.monotonic()
    config = bench._config(bench.command_parser().parse_args(arguments))
    runner = load_runner(config, lambda *_: None, 0)
    driver = bench.EngineBench(runner, runner.ready().max_num_batched_tokens)
    print(f"[loaded in {time.monotonic() - began:.0f} s; {runner.ready().device}]", flush=True)
    for rows in batches:
        driver.prefill(rows, options.context)
        seconds = driver.decode(rows, options.context, 16) / 16
        plans = iter([driver.decode_plan(rows, options.context + 16 + i) for i in range(STEPS)])
        report(rows, seconds, profile(partial(_next, driver, plans)))


def _next(driver: Any, plans: Any) -> None:
    driver.run(next(plans))


if __name__ == "__main__":
    main()
