"""Where a decode step's time goes on the CPU pool: each phase of each operation, and what its threads did meanwhile.

    python -m benchmarks.pool_phases --model 12-layers.gguf [--load-format dummy] [--batch 1,8] [--prompt 512]
        [--gen 50]

Phases of one kind (the same operation, number within it and amount of work) share a line. All times are microseconds,
means over the phases of a kind:

    wall     from the end of the phase before to the end of this one
    late     until a thread came to the phase, mean and last
    at work  of a thread that had any: until nothing was left to begin, mean and longest
    ahead    of one thread, of that: small operations behind this one
    idle     from there to the end of the phase, mean of all threads: what better shares would save at most

A step's first phase has in its wall what lies between two steps: sampling, Python, the threads' waking.
"""

from __future__ import annotations

import statistics
import sys

from moeserve.cli.bench import engine as bench
from moeserve.kernels.phase_times import (
    operation_names,
    phase_times,
    ticks_per_second,
    time_phases,
)
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.load import load_runner
from tests.support.measuring.phase_kinds import Kind, Spent, spent_by_kind


def _print(found: dict[Kind, Spent], steps: int, per_us: float, seconds: float) -> None:
    def mean(values: list[float]) -> float:
        return statistics.fmean(values) / per_us

    print(
        f"{'phase':<34}{'a step':>7}{'share':>7}{'wall':>9}{'late, last':>14}{'at work, longest':>19}"
        f"{'ahead':>7}{'idle':>8}"
    )
    step = seconds / steps * 1e6
    for kind, spent in sorted(found.items(), key=lambda item: -sum(item[1].wall)):
        share = sum(spent.wall) / steps / per_us / step
        label = f"{kind.operation} {kind.number}, {kind.units} units"
        print(
            f"{label:<34}{len(spent.wall) / steps:>7.1f}{share:>7.1%}{mean(spent.wall):>9.1f}"
            f"{mean(spent.late):>7.1f},{mean(spent.latest):>6.1f}"
            f"{mean(spent.working):>11.1f},{mean(spent.longest):>7.1f}{mean(spent.ahead):>7.1f}{mean(spent.idle):>8.1f}"
        )
    print(f"a step {step:.0f} us", flush=True)


def main(arguments: list[str]) -> int:
    args = bench.command_parser().parse_args(arguments)
    runner = load_runner(bench._config(args), lambda stage, done, total: None)
    driver = bench.EngineBench(runner, runner.ready().max_num_batched_tokens, args.temperature)
    assert isinstance(runner.engine, CpuEngine)
    stream = runner.engine.stream
    per_us = ticks_per_second() / 1e6
    for batch in args.batch:
        driver.prefill(batch, args.prompt)
        driver.decode(batch, args.prompt, 5)
        read = driver.read_gb_s()
        untimed = driver.decode(batch, args.prompt, args.gen)
        time_phases(stream.pool, 4096 * args.gen)
        seconds = driver.decode(batch, args.prompt, args.gen)
        stream.wait()
        found = spent_by_kind(phase_times(stream.pool), operation_names(stream.pool))
        time_phases(stream.pool, 0)
        print(
            f"batch {batch}: {batch * args.gen / untimed:.1f} tok/s, timed {batch * args.gen / seconds:.1f}; "
            f"read {read:.1f} and {driver.read_gb_s():.1f} GB/s, {stream.threads} threads ({stream.isa})"
        )
        _print(found, args.gen, per_us, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
