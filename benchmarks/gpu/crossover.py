"""Prompts with experts in RAM: by the CPU alone, streamed to the GPU, and both at once, by their length.

    python -m benchmarks.gpu.crossover [--experts 0] [--tokens 128,256,512,1024,2048,8192] [--sweep]

Whole steps of one prompt through the worker's runner, Qwen3-30B-A3B's shape with random weights (Q4_K_M mix). First the
calibration as a server does it, beside the crossover of the two pure ways measured around what it found: at 7 sizes,
where the lines through neighbours meet. --sweep: the time by the part that is streamed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.header import QWEN3_30B_A3B, write_header
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.measure.expert_streaming_share import calibrate_streaming, time_prompt
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner

AROUND = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # of the calibrated crossover
MOST_ON_CPU = 2048  # tokens: the CPU's rate no longer changes, and more would take long
PARTS = tuple(i / 8 for i in range(9))
SWEPT = (64, 128, 256, 512, 1024, 2048)


def load(experts: int, most: int, **options: object) -> Runner:
    """With `experts` of each layer on the GPU, for steps of up to `most` tokens; not calibrated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "30b.gguf"
        write_header(path, QWEN3_30B_A3B)
        fixed: dict[str, object] = {
            "model": str(path),
            "load_format": "dummy",
            "device": "cuda",
            "num_gpu_experts": experts,
            "gpu_prefill_token_threshold": 1 << 20,
            "max_num_seqs": 1,
            "max_num_batched_tokens": most,
            "max_model_len": most,
            "max_total_tokens": 2 * most,
        }
        config = resolve(ServerConfig(**(fixed | options)))  # type: ignore[arg-type]
        return load_runner(config, lambda *_: None)


def engine_of(runner: Runner) -> GpuEngine:
    assert isinstance(runner.engine, GpuEngine)
    return runner.engine


def report_crossover(engine: GpuEngine) -> None:
    started = time.perf_counter()
    found = calibrate_streaming(engine, engine.max_step_rows)
    print(f"calibrated in {time.perf_counter() - started:.1f} s: {found}", flush=True)
    if found.threshold is None:
        return
    sizes = [round(share * found.threshold) for share in AROUND]
    ways = [[time_prompt(engine, n, part) for n in sizes] for part in (0.0, 1.0)]
    for n, on_cpu, streamed in zip(sizes, *ways, strict=True):
        print(
            f"{n:6} tokens: CPU alone {on_cpu * 1e3:7.1f} ms, streamed {streamed * 1e3:7.1f} ms", flush=True
        )
    measured = where_they_meet(sizes, *ways)
    print(f"crossover: calibrated {found.threshold}, measured {measured} tokens", flush=True)


def where_they_meet(sizes: Sequence[int], on_cpu: Sequence[float], streamed: Sequence[float]) -> int | None:
    """The first size from which on streaming is faster at all larger ones, between two by straight lines."""
    gain = [a - b for a, b in zip(on_cpu, streamed, strict=True)]
    first = next((i for i in range(len(gain)) if all(g >= 0 for g in gain[i:])), None)
    if not first:
        return None
    low, high = first - 1, first
    share = -gain[low] / (gain[high] - gain[low])
    return round(sizes[low] + share * (sizes[high] - sizes[low]))


def report_speeds(engine: GpuEngine, sizes: Sequence[int]) -> None:
    """In tokens a second; shared as the runner would now."""
    print(f"{'tokens':>7}{'CPU alone':>11}{'streamed':>10}{'shared':>9}{'part':>7}", flush=True)
    for n in sizes:
        part = engine.streaming.part(n)
        shared, streamed = n / time_prompt(engine, n, part), n / time_prompt(engine, n, 1.0)
        on_cpu = f"{n / time_prompt(engine, n, 0.0):.0f}" if n <= MOST_ON_CPU else ""
        print(f"{n:7}{on_cpu:>11}{streamed:10.0f}{shared:9.0f}{part:7.2f}", flush=True)


def sweep(engine: GpuEngine) -> None:
    print(f"ms by part{'':4}" + "".join(f"{part:8.3f}" for part in PARTS))
    for n in SWEPT:
        times = [time_prompt(engine, n, part) for part in PARTS if part or n <= MOST_ON_CPU]
        print(f"{n:7} tokens" + "".join(f"{t * 1e3:8.1f}" for t in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=0, help="of each layer on the GPU")
    parser.add_argument("--tokens", default="128,256,512,1024,2048,8192")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    sizes = [int(n) for n in args.tokens.split(",")]
    engine = engine_of(load(args.experts, max(*sizes, *SWEPT)))
    print(engine.description, flush=True)
    if args.sweep:
        sweep(engine)
    report_crossover(engine)
    report_speeds(engine, sizes)


if __name__ == "__main__":
    main()
