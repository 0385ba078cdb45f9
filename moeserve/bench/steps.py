"""`moeserve bench steps`: how long a step takes by what is in it, as a model for `moeserve simulate`.

The real runner, in this process: chunks of every size at growing depth of one long prompt, growing batches that
decode, chunks beside decoding rows, and batches in which the long one decodes, too. The model is fitted to all
these steps at once; how far it is off them is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from moeserve.bench import engine
from moeserve.bench.window_slots import WindowSlots
from moeserve.command_line import add_shared_options, read_options, resolve
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, UserError
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.messages.worker import Worker
from moeserve.placement.step_tokens import MOST_ON_GPU, ON_CPU
from moeserve.simulate.fit import StepSample, fit, relative_errors
from moeserve.simulate.step_time import StepTime, load_of, write_step_time
from moeserve.worker.device import choose_device
from moeserve.workload.options import whole

# Options of the server that mean the same here.
SHARED = (*engine.SHARED, "max_num_seqs")
SMALLEST_CHUNK = 8
SHORT_PROMPT = 16
LONGEST_CHUNKS = 8  # full steps in the long prompt, unless the user or the model's context says otherwise
REPEATS = 5  # of a decode step; its median counts
BESIDE = 8  # decoding rows in a mixed step of a few tokens
MANY_BESIDE, LARGE_CHUNKS = 64, (512, 2048)  # and in one of many
LONG = 0  # the sequence with the long prompt; the others are short
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class StepBench:
    """Drives a worker as the router would. KV slots are handed out in order."""

    def __init__(self, runner: Worker, num_seqs: int, step_tokens: int, long_prompt: int) -> None:
        self._runner = runner
        self._num_seqs = num_seqs
        self._step_tokens = step_tokens
        self._prompt = [long_prompt] + [SHORT_PROMPT] * (num_seqs - 1)  # lengths, by sequence
        self._computed = [0] * num_seqs  # positions, by sequence
        self._num_slots = 0
        self._windows = WindowSlots(runner.ready())
        self._num_steps = 0
        self._random = np.random.default_rng(0)
        self.samples: list[StepSample] = []

    def measure(self) -> None:
        sizes = powers_of_two(SMALLEST_CHUNK, self._step_tokens)
        mixed = [(BESIDE, size) for size in sizes if 2 * BESIDE < size <= 16 * BESIDE]
        mixed += [(MANY_BESIDE, size) for size in sizes if size in LARGE_CHUNKS]
        mixed = [(rows, size) for rows, size in mixed if rows < self._num_seqs]
        in_mixed = sum(size - rows for rows, size in mixed)
        self._step([self._chunk(LONG, SMALLEST_CHUNK)])  # the first touch of every buffer: not a sample
        while sum(sizes) + in_mixed >= self._left:
            sizes.pop()  # a short context: the line goes on from the largest that there is room for
        while sum(sizes) + in_mixed < self._left:
            for size in sizes:
                self._once([self._chunk(LONG, size)])
        self._of_equals([self._step([self._chunk(seq, SHORT_PROMPT)]) for seq in range(1, self._num_seqs)])
        for batch in powers_of_two(1, self._num_seqs - 1):
            self._median(partial(self._decode, range(1, 1 + batch)))
        for rows, size in mixed:
            beside = self._decode(range(1, 1 + rows))
            self._once([*beside, self._chunk(LONG, size - rows)])
        # Chunks of the same sizes far into the prompt, which tells what depth costs and what size.
        for size in reversed(sizes):
            while size < self._left:
                self._once([self._chunk(LONG, size)])
        self._step([self._chunk(LONG, self._left)])
        for batch in powers_of_two(1, self._num_seqs):
            self._median(partial(self._decode, range(LONG, LONG + batch)))

    @property
    def _left(self) -> int:
        """Tokens of the long prompt that are still to compute."""
        return self._prompt[LONG] - self._computed[LONG]

    def _chunk(self, seq: int, count: int) -> Row:
        start = self._computed[seq]
        self._computed[seq] += count
        samples = self._computed[seq] == self._prompt[seq]
        return Row(seq, start, count, self._slots(count), samples, self._windows.take(seq, start, count))

    def _decode(self, seqs: range) -> list[Row]:
        rows = []
        for seq in seqs:
            at = self._computed[seq]
            rows.append(Row(seq, at, 1, self._slots(1), True, self._windows.take(seq, at, 1)))
            self._computed[seq] += 1
        return rows

    def _slots(self, count: int) -> bytes:
        self._num_slots += count
        return np.arange(self._num_slots - count, self._num_slots, dtype=np.int32).tobytes()

    def _once(self, rows: list[Row]) -> None:
        self.samples.append(self._step(rows))

    def _median(self, rows: Callable[[], list[Row]]) -> None:
        self._of_equals([self._step(rows()) for _ in range(REPEATS)])

    def _of_equals(self, steps: list[StepSample]) -> None:
        """One sample for steps that have the same in them: as many would outweigh all others."""
        if steps:
            self.samples.append(sorted(steps, key=lambda sample: sample.seconds)[len(steps) // 2])

    def _step(self, rows: list[Row]) -> StepSample:
        self._num_steps += 1
        plan = StepPlan(self._num_steps, [self._bind(row.req_slot) for row in rows if row.start == 0], rows)
        return StepSample(load_of(plan), self._runner.step(plan).compute_ms / 1e3)

    def _bind(self, seq: int) -> NewSeq:
        count = self._prompt[seq]
        tokens = self._random.integers(0, self._runner.ready().vocab_size, count, dtype=np.int32)
        return NewSeq(seq, tokens.tobytes(), count, b"", GREEDY)


def slots_needed(num_seqs: int, long_prompt: int) -> int:
    """All prompts, and what `measure` decodes: REPEATS x (1 + 2 + 4 ... < 2 num_seqs) twice, and mixed steps."""
    in_mixed = BESIDE * 17 + MANY_BESIDE * len(LARGE_CHUNKS)
    return long_prompt + num_seqs * SHORT_PROMPT + REPEATS * 4 * num_seqs + in_mixed


def powers_of_two(low: int, high: int) -> list[int]:
    """Those in low .. high."""
    return [1 << e for e in range(high.bit_length()) if low <= 1 << e <= high]


def report(model: StepTime, samples: list[StepSample]) -> str:
    errors = relative_errors(model, samples)
    rows = [f"{'tokens':>8}{'ms':>10}"]
    rows += [f"{n:>8}{t * 1e3:>10.2f}" for n, t in zip(model.tokens, model.seconds, strict=True)]
    if model.decode_rows:
        rows += ["", f"{'decode rows':>11}{'ms':>7}"]
        rows += [
            f"{n:>11}{t * 1e3:>7.2f}" for n, t in zip(model.decode_rows, model.decode_seconds, strict=True)
        ]
    rows += [
        "",
        f"{model.decode_context * 1e9:.1f} ns for each position that a decode row reads",
        f"{model.prefill_pairs * 1e9:.2f} ns for each pair of a prompt token and a position that it reads",
        f"{model.sampled_row * 1e6:.1f} us for each row that samples",
        f"{model.prompt * 1e3:.2f} ms for having a prompt, and {model.prompt_span * 1e9:.1f} ns for each position up "
        "to its end",
        f"off the {len(samples)} measured steps by {np.median(abs(errors)):.1%} in the median, "
        f"{np.percentile(abs(errors), 90):.1%} at most in nine of ten",
    ]
    return "\n".join([model.source, *rows])


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with a message for bad arguments or a bad file."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        model = measure(*_config(args), report_to=print)
        if args.output is not None:
            write_step_time(args.output, model)
    except (UserError, OSError) as error:
        parser.error(str(error))
    return 0


def measure(config: ServerConfig, long_prompt: int, report_to: Callable[[str], object]) -> StepTime:
    """Loads the model, which may take a while, measures and fits. Raises UserError."""
    from moeserve.worker.loading import load_runner  # torch, which --help does without

    runner = load_runner(config, engine.TerminalBar())
    num_seqs = config.max_num_seqs
    room = runner.ready().max_model_len - REPEATS * num_seqs.bit_length() - 1  # for what it decodes after
    bench = StepBench(runner, num_seqs, runner.ready().max_num_batched_tokens, min(long_prompt, room))
    bench.measure()
    ready = runner.ready()
    model = msgspec.structs.replace(
        fit(bench.samples, f"{config.served_model_name}, {ready.device}"),
        num_experts=ready.num_experts,
        experts_per_token=ready.experts_per_token,
        step_tokens=ready.max_num_batched_tokens,
        prompts_first=ready.prompts_first,
    )
    report_to(report(model, bench.samples))
    return model


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve bench steps",
        usage="%(prog)s [options]",
        description="Measure how long a step takes by what is in it, and fit the model that `moeserve simulate` takes.",
        allow_abbrev=False,
    )
    add_shared_options(parser, SHARED)
    parser.add_argument(
        "--long-prompt",
        type=whole(256, 1 << 20),
        metavar="N",
        help=f"tokens of the one long prompt (default: {LONGEST_CHUNKS} full steps; at most what the model takes)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the model as JSON")
    return parser


def _config(args: argparse.Namespace) -> tuple[ServerConfig, int]:
    """And the length of the long prompt. Raises ConfigError."""
    config = resolve(read_options({name: getattr(args, name) for name in SHARED}, os.environ))
    device = choose_device(config.device)  # once, as a GPU that cannot be used is in the log each time
    in_a_step = config.max_num_batched_tokens or (ON_CPU if device == "cpu" else MOST_ON_GPU)
    if in_a_step < SHORT_PROMPT:
        raise ConfigError(f"--max-num-batched-tokens: steps of at least {SHORT_PROMPT} tokens are measured")
    long_prompt = args.long_prompt or max(LONGEST_CHUNKS * in_a_step, 256)
    slots = slots_needed(config.max_num_seqs, long_prompt)
    config = dataclasses.replace(
        config, device=device, max_total_tokens=slots, max_num_batched_tokens=in_a_step
    )
    return config, long_prompt
