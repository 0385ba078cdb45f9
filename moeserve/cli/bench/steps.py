"""`moeserve bench steps`: fits a model that predicts a step's duration from the step's contents, for `moeserve
simulate`.

It runs the real runner in this process and times these steps: chunks of every size at growing depth of one long prompt,
growing decode batches, chunks with decoding rows in the same step, several prompts in a step, decode batches that
contain the long sequence, and decode batches that together have the long prompt's context. The model is fitted to all
steps at once, and its error is printed.

Decode is measured as in a server: the next plan is ready while a step is computed, and tokens are sampled at
temperature 1 (with random weights, greedy answers soon use the same experts again and again).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moeserve.cli.bench import engine
from moeserve.cli.bench.plans_in_turn import run_in_turn
from moeserve.cli.bench.window_slots import WindowSlots
from moeserve.cli.command_line import add_shared_options, read_options, resolve
from moeserve.cli.simulate.fit import StepSample, fit, relative_errors
from moeserve.cli.simulate.step_time import StepTime, load_of, write_step_time
from moeserve.cli.workload.options import whole
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, UserError
from moeserve.kv.driven_slots import SlotCounter, slots_in_turn
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan, StepResult
from moeserve.messages.worker import Worker
from moeserve.placement.step_tokens import MOST_ON_GPU, ON_CPU
from moeserve.worker.loading.device import choose_device

if TYPE_CHECKING:  # torch is loaded with a runner, not for --help
    from moeserve.worker.runner import Runner

# Options of the server that mean the same here.
SHARED = (*engine.SHARED, "max_num_seqs")
SMALLEST_CHUNK = 8
SHORT_PROMPT = 16
TOGETHER = 256  # tokens of each prompt in steps of several prompts
# Full steps in the long prompt, unless the user or the model's context sets another number.
LONGEST_CHUNKS = 8
REPEATS = 5  # repetitions of a decode step; the median counts
BESIDE = 8  # decoding rows in a mixed step of a few tokens
MANY_BESIDE, LARGE_CHUNKS = 64, (512, 2048)  # decoding rows, and chunk sizes in tokens, of large mixed steps
LONG = 0  # the sequence with the long prompt; the others are short


class StepBench:
    """Drives a worker as the router would. KV slots are assigned in order."""

    def __init__(self, runner: Worker, num_seqs: int, step_tokens: int, long_prompt: int) -> None:
        self._runner = runner
        self._num_seqs = num_seqs
        self._step_tokens = step_tokens
        self._long_prompt = long_prompt
        # Prompt lengths in tokens, by sequence.
        self._prompt = [long_prompt] + [SHORT_PROMPT] * (num_seqs - 1)
        self._computed = [0] * num_seqs  # computed positions, by sequence
        self._slots = SlotCounter(runner.ready().kv_slot_kinds)
        self._windows = WindowSlots(runner.ready())
        self._num_steps = 0
        self._random = np.random.default_rng(0)
        self.samples: list[StepSample] = []
        # Additional seconds of a step that is not launched ahead. `measure` sets them.
        self.launch_s = 0.0

    def measure(self) -> None:
        sizes = powers_of_two(SMALLEST_CHUNK, self._step_tokens)
        mixed = [(BESIDE, size) for size in sizes if 2 * BESIDE < size <= 16 * BESIDE]
        mixed += [(MANY_BESIDE, size) for size in sizes if size in LARGE_CHUNKS]
        mixed = [(rows, size) for rows, size in mixed if rows < self._num_seqs]
        in_mixed = sum(size - rows for rows, size in mixed)
        # Warm-up, not a sample: touches every buffer for the first time.
        self._step([self._chunk(LONG, SMALLEST_CHUNK)])
        while sum(sizes) + in_mixed >= self._left:
            sizes.pop()  # in a short context, the largest sizes that do not fit are left out
        while sum(sizes) + in_mixed < self._left:
            for size in sizes:
                self._once([self._chunk(LONG, size)])
        for size in powers_of_two(2 * TOGETHER, min(self._step_tokens, self._computed[LONG])):
            if size // TOGETHER < self._num_seqs:
                self._together(size // TOGETHER)
        self._of_equals([self._step([self._chunk(seq, SHORT_PROMPT)]) for seq in range(1, self._num_seqs)])
        for batch in powers_of_two(1, self._num_seqs - 1):
            self._repeat(range(1, 1 + batch))
        if self._runner.runs_ahead:
            self._measure_launch()
        for rows, size in mixed:
            beside = self._decode(range(1, 1 + rows))
            self._once([*beside, self._chunk(LONG, size - rows)])
        # Chunks of the same sizes deep in the prompt: they separate the cost of depth from the cost of size.
        for size in reversed(sizes):
            while size < self._left:
                self._once([self._chunk(LONG, size)])
        self._step([self._chunk(LONG, self._left)])
        for batch in powers_of_two(1, self._num_seqs):
            self._repeat(range(LONG, LONG + batch))
        for batch in powers_of_two(2, self._num_seqs):
            self._share_out(batch)
            self._repeat(range(batch))

    @property
    def _left(self) -> int:
        """Returns the tokens of the long prompt that are not computed yet."""
        return self._prompt[LONG] - self._computed[LONG]

    def _chunk(self, seq: int, count: int) -> Row:
        start = self._computed[seq]
        self._computed[seq] += count
        samples = self._computed[seq] == self._prompt[seq]
        return Row(
            seq, start, count, self._slots.take(start, count), samples, self._windows.take(seq, start, count)
        )

    def _decode(self, seqs: range) -> list[Row]:
        rows = []
        for seq in seqs:
            at = self._computed[seq]
            rows.append(Row(seq, at, 1, self._slots.take(at, 1), True, self._windows.take(seq, at, 1)))
            self._computed[seq] += 1
        return rows

    def _together(self, prompts: int) -> None:
        """Computes several complete new prompts in one step. Their KV overwrites the long prompt's."""
        rows, counter = [], SlotCounter(self._runner.ready().kv_slot_kinds)
        for seq in range(1, 1 + prompts):
            slots = counter.take(0, TOGETHER)
            rows.append(Row(seq, 0, TOGETHER, slots, True, self._windows.take(seq, 0, TOGETHER)))
        plan = self._plan(rows, [self._new(row.req_slot, TOGETHER) for row in rows])
        self.samples.append(_sample(plan, self._runner.step(plan)))

    def _share_out(self, batch: int) -> None:
        """Decodes a batch of new sequences whose cached prefixes have equal shares of the long prompt's number of KV
        slots."""
        each = self._long_prompt // batch
        new, rows = [], []
        for seq in range(batch):
            prefix = slots_in_turn(self._runner.ready().kv_slot_kinds, batch, seq, 0, each)
            new.append(self._new(seq, each + 1, prefix, self._windows.take_last(seq, each)))
            self._computed[seq] = each
            rows += self._decode(range(seq, seq + 1))
        self._runner.step(self._plan(rows, new))

    def _once(self, rows: list[Row]) -> None:
        self.samples.append(self._step(rows))

    def _repeat(self, seqs: range) -> None:
        """Repeats decode steps of these sequences. The first step is no sample, because it is not launched ahead."""
        plans = [self._plan(self._decode(seqs)) for _ in range(1 + REPEATS)]
        answered = list(run_in_turn(self._runner, plans))
        steps = zip(plans, answered, strict=True)
        self._of_equals([_sample(plan, one.result) for plan, one in islice(steps, 1, None)])

    def _measure_launch(self) -> None:
        """Measures `launch_s` from steps of one row."""
        plans = [self._plan(self._decode(range(1, 2))) for _ in range(2 * REPEATS)]
        alone = [self._runner.step(plan).compute_ms for plan in plans[:REPEATS]]
        behind = [a.result.compute_ms for a in run_in_turn(self._runner, plans[REPEATS:]) if a.is_ahead]
        self.launch_s = max(median(alone) - median(behind), 0.0) / 1e3

    def _of_equals(self, steps: list[StepSample]) -> None:
        """Adds one sample for several steps with equal contents. One sample for each of them would outweigh all other
        steps."""
        if steps:
            self.samples.append(sorted(steps, key=lambda sample: sample.seconds)[len(steps) // 2])

    def _step(self, rows: list[Row]) -> StepSample:
        new = [self._new(row.req_slot, self._prompt[row.req_slot]) for row in rows if row.start == 0]
        plan = self._plan(rows, new)
        return _sample(plan, self._runner.step(plan))

    def _plan(self, rows: list[Row], new: Sequence[NewSeq] = ()) -> StepPlan:
        self._num_steps += 1
        return StepPlan(self._num_steps, list(new), rows)

    def _new(self, seq: int, count: int, prefix: bytes = b"", in_window: bytes = b"") -> NewSeq:
        """Returns a new sequence of `count` random tokens. prefix, in_window: NewSeq's slots of the cached prefix."""
        tokens = self._random.integers(0, self._runner.ready().vocab_size, count, dtype=np.int32)
        sampling = SamplingParams(max_tokens=1 << 20, seed=seq)
        return NewSeq(seq, tokens.tobytes(), count, prefix, sampling, prefix_window_slots=in_window)


def _sample(plan: StepPlan, result: StepResult) -> StepSample:
    return StepSample(load_of(plan), result.compute_ms / 1e3)


def slots_needed(num_seqs: int, long_prompt: int) -> int:
    """Returns the KV slots that `measure` needs for all prompts and all decoded tokens. Each kind of batch needs 1 + 2
    + 4 + ... < 2 num_seqs; steps of one row and mixed steps are added."""
    in_mixed = BESIDE * 17 + MANY_BESIDE * len(LARGE_CHUNKS)
    batches = (3 * (1 + REPEATS) + 1) * 2 * num_seqs
    return long_prompt + num_seqs * SHORT_PROMPT + batches + 2 * REPEATS + in_mixed


def powers_of_two(low: int, high: int) -> list[int]:
    """Returns the powers of two from low to high, both included."""
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
        f"{model.decode_context * 1e9:.1f} ns for each position that a decode row reads, and "
        f"{model.decode_span * 1e9:.1f} ns for each that the farthest one reads",
        f"{model.prefill_pairs * 1e9:.2f} ns for each pair of a prompt token and a position that it reads",
        f"{model.sampled_row * 1e6:.1f} us for each row that samples, and {model.sampling * 1e3:.2f} ms if any does",
        f"{model.prompt * 1e3:.2f} ms for having a prompt, and {model.prompt_span * 1e9:.1f} ns for each position up "
        "to its end",
        *_of_launches(model),
        f"off the {len(samples)} measured steps by {np.median(abs(errors)):.1%} in the median, "
        f"{np.percentile(abs(errors), 90):.1%} at most in nine of ten",
    ]
    return "\n".join([model.source, *rows])


def _of_launches(model: StepTime) -> list[str]:
    if not model.ahead_tokens:
        return []
    return [f"{model.launch * 1e3:.2f} ms for a step of decode rows that is not launched behind another"]


def main(arguments: list[str]) -> int:
    """Returns exit code 0, or 2 with a message for bad arguments or a bad file."""
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
    """Loads the model, measures steps, and returns the duration model that is fitted to them. Takes minutes. report_to:
    takes the report's lines. Raises UserError if the model cannot be loaded."""
    from moeserve.worker.loading.load import load_runner  # imports torch, which --help does not need

    runner = load_runner(config, engine.TerminalBar())
    num_seqs = config.max_num_seqs
    # The long prompt is shortened by the tokens that its sequence decodes later.
    room = runner.ready().max_model_len - (1 + REPEATS) * num_seqs.bit_length() - 1
    bench = StepBench(runner, num_seqs, runner.ready().max_num_batched_tokens, min(long_prompt, room))
    bench.measure()
    ready = runner.ready()
    model = msgspec.structs.replace(
        fit(bench.samples, f"{config.served_model_name}, {ready.device}"),
        num_experts=ready.num_experts,
        experts_per_token=ready.experts_per_token,
        step_tokens=ready.max_num_batched_tokens,
        prompts_first=ready.prompts_first,
        ahead_tokens=_ahead_tokens(runner),
        launch=bench.launch_s,
        measured_steps=ready.measured_steps,
    )
    report_to(report(model, bench.samples))
    return model


def _ahead_tokens(runner: Runner) -> int:
    """Returns the value of StepTime.ahead_tokens for this runner."""
    if not runner.runs_ahead:
        return 0
    sizes = powers_of_two(1, runner.ready().max_num_batched_tokens)
    return max((n for n in sizes if runner.engine.launches_at_once([n], [0])), default=0)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve bench steps",
        usage="%(prog)s [options]",
        description=(
            "Measure how long steps take depending on their contents, and fit the step-time model for `moeserve "
            "simulate`."
        ),
        allow_abbrev=False,
    )
    add_shared_options(parser, SHARED)
    parser.add_argument(
        "--long-prompt",
        type=whole(256, 1 << 20),
        metavar="N",
        help=f"length in tokens of the long prompt that is measured (default: {LONGEST_CHUNKS} full steps, or the "
        "model's context length if that is less)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the step-time model as JSON to this file"
    )
    return parser


def _config(args: argparse.Namespace) -> tuple[ServerConfig, int]:
    """Returns the configuration and the long prompt's length in tokens. Raises ConfigError."""
    config = resolve(read_options({name: getattr(args, name) for name in SHARED}, os.environ))
    device = choose_device(config.device)  # once: each choice logs a GPU that cannot be used
    in_a_step = config.max_num_batched_tokens or (ON_CPU if device == "cpu" else MOST_ON_GPU)
    if in_a_step < SHORT_PROMPT:
        raise ConfigError(
            f"--max-num-batched-tokens: must be at least {SHORT_PROMPT}, because steps of that many "
            "tokens are measured"
        )
    long_prompt = args.long_prompt or max(LONGEST_CHUNKS * in_a_step, 256)
    slots = slots_needed(config.max_num_seqs, long_prompt)
    config = dataclasses.replace(
        config, device=device, max_total_tokens=slots, max_num_batched_tokens=in_a_step
    )
    return config, long_prompt
