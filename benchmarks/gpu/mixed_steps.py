"""What steps of a prompt's tokens beside decode rows are made of, or of decode rows alone, by CUPTI.

`python -m benchmarks.gpu.step_profile --chunks` prints it.

Kernels are launched as a server launches them, so that one may start while the one before it ends: a moment is counted
for the first of those that run. What no kernel has is idle.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.gpu.traced import Event, trace

STEPS = 5
LINES = 24


def report(title: str, walls: list[float], events: list[Event]) -> None:
    """walls: seconds of each step, not traced."""
    share: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    end, idle, gaps = events[0][2], 0.0, 0
    for name, grid, start, stop in events:
        if start > end:
            idle += start - end
            gaps += 1
        share[name[:40], grid].append(max(0.0, stop - max(start, end)))
        end = max(end, stop)
    span = (end - events[0][2]) / STEPS / 1e3
    wall = sorted(walls)[len(walls) // 2] * 1e3
    print(
        f"{title}: {wall:.2f} ms a step untraced; traced {span:.2f}, of it idle {idle / STEPS / 1e3:.2f} ms "
        f"({gaps / STEPS:.0f} gaps)"
    )
    for (name, grid), times in sorted(share.items(), key=lambda item: -sum(item[1]))[:LINES]:
        print(
            f"    {name:<40} {grid!s:<18} {len(times) / STEPS:6.1f} x {sum(times) / len(times):7.1f} us "
            f"= {sum(times) / STEPS / 1e3:6.2f} ms",
            flush=True,
        )


class Mixed:
    """Sequences 0 .. rows - 1 decode; a last one has its prompt computed in chunks."""

    def __init__(self, driver: Any, sequences: int) -> None:
        self._driver, self._sequences = driver, sequences
        self._positions = [0] * sequences

    def fill(self, seq: int, prompt: int, computed: int) -> None:
        """A prompt of random tokens, the first of them computed."""
        from moeserve.kv.driven_slots import slots_in_turn
        from moeserve.messages.sampling import SamplingParams
        from moeserve.messages.steps import NewSeq, Row, StepPlan

        d = self._driver
        ready = d._runner.ready()
        tokens = np.random.default_rng(seq).integers(0, ready.vocab_size, prompt, dtype=np.int32)
        state = seq if ready.num_state_slots else -1
        sampling = SamplingParams(max_tokens=1 << 20, temperature=1.0, seed=seq)
        new = [NewSeq(seq, tokens.tobytes(), prompt, b"", sampling, state_slot=state)]
        copies = np.array([[-1, seq]], np.int32).tobytes() if state >= 0 else b""
        for start in range(0, computed, d._step_tokens):
            count = min(d._step_tokens, computed - start)
            slots = slots_in_turn([], self._sequences, seq, start, count)
            row = Row(seq, start, count, slots, start + count == prompt, d._windows.take(seq, start, count))
            d.run(StepPlan(d.steps, new, [row], state_copies=copies))
            new, copies = [], b""
        self._positions[seq] = computed

    def step(self, rows: int, chunk: int) -> None:
        from moeserve.kv.driven_slots import slots_in_turn
        from moeserve.messages.steps import Row, StepPlan

        d, n, made = self._driver, self._sequences, []
        for seq, count in [*((i, 1) for i in range(rows)), *([(n - 1, chunk)] if chunk else [])]:
            at = self._positions[seq]
            made.append(
                Row(
                    seq,
                    at,
                    count,
                    slots_in_turn([], n, seq, at, count),
                    count == 1,
                    d._windows.take(seq, at, count),
                )
            )
            self._positions[seq] += count
        d.run(StepPlan(d.steps, [], made))


def profile_mixed(model: str, rows: list[int], chunks: list[int], context: int, weights: bool) -> None:
    """rows: of each step without a chunk; the first of them beside each chunk. weights: the file has them."""
    from moeserve.cli.bench import engine as bench
    from moeserve.worker.loading.load import load_runner

    sequences = max(rows) + 1
    arguments = [
        "--model", model, "--device", "cuda", "--batch", str(sequences), "--prompt",
        str(context + 12 * max([0, *chunks])), "--gen", "512", "--max-num-batched-tokens",
        "8192" if chunks else "512",
    ]  # fmt: skip
    if not weights:
        arguments += ["--load-format", "dummy"]
    began = time.monotonic()
    config = bench._config(bench.command_parser().parse_args(arguments))
    runner = load_runner(config, lambda *_: None, 0)
    driver = bench.EngineBench(runner, runner.ready().max_num_batched_tokens)
    print(f"[loaded in {time.monotonic() - began:.0f} s; {runner.ready().device}]", flush=True)
    mixed = Mixed(driver, sequences)
    for seq in range(max(rows)):
        mixed.fill(seq, context, context)
    for count, chunk in [(n, 0) for n in rows] + [(rows[0], n) for n in chunks]:
        if chunk:
            start = max(0, context - (2 * STEPS + 2) * chunk // 2)
            mixed.fill(sequences - 1, start + (2 * STEPS + 3) * chunk, start)
        walls = []
        for _ in range(STEPS + 2):
            started = time.perf_counter()
            mixed.step(count, chunk)
            walls.append(time.perf_counter() - started)
        events = trace([lambda: mixed.step(count, chunk)] * STEPS)  # noqa: B023 - they run here
        report(f"{count} rows and {chunk} tokens", walls[2:], events)
