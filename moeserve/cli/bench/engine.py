"""`moeserve bench engine`: measures the real worker in this process, without sockets, as llama-bench does for
llama.cpp.

It measures prefill and decode at several batch sizes, with random prompts and by default greedy sampling. Each figure
comes with the memory read bandwidth measured in the same run (on the CPU by reading the model's weights): on a shared
machine the bandwidth changes by the minute, and decode depends on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from moeserve.cli.bench.drafts import DraftedDecode, add_acceptance, room_of
from moeserve.cli.bench.engine_figures import HEADER, CacheFigure, Figure, Timed, where_experts_are
from moeserve.cli.bench.plans_in_turn import run_in_turn
from moeserve.cli.bench.results import Measured, results_of, write_results
from moeserve.cli.bench.window_slots import WindowSlots
from moeserve.cli.command_line import add_shared_options, read_options, resolve
from moeserve.cli.workload.options import real, whole
from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError, UserError
from moeserve.kv.driven_slots import slots_in_turn
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan, StepResult
from moeserve.placement.expert_cache.replay import SETTLING_STEPS
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, read_trace

if TYPE_CHECKING:  # torch is imported with a runner, not for --help
    from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
    from moeserve.worker.runner import Runner

# Options that have the same meaning as the server's.
SHARED = (
    "model",
    "load_format",
    "device",
    "gpus",
    "parallel",
    "num_gpu_experts",
    "gpu_memory_budget",
    "unpacked_experts",
    "expert_heat",
    "placement_rules",
    "n_gpu_layers",
    "gpu_prefill_token_threshold",
    "expert_cache",
    "threads",
    "isa",
    "weight_layout",
    "expert_ram",
    "numa_nodes",
    "cpu_binding",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "kv_window_ratio",
    "speculative_config",
    "speculative_model",
)


class EngineBench:
    """Drives a Runner as the router would; all sequences are at the same position. KV slots are assigned in order."""

    def __init__(
        self, runner: Runner, step_tokens: int, temperature: float = 0.0, trace: RoutingTrace | None = None
    ) -> None:
        """trace: the experts that decode steps use instead of the routers' choice; the runner must have been loaded for
        a trace."""
        self._runner = runner
        self._trace = trace
        self._step_tokens = step_tokens
        self._temperature = temperature
        self._windows = WindowSlots(runner.ready())
        self._random = np.random.default_rng(0)
        self.steps = 0

    def figures(self, batches: list[int], prompt: int, gen: int, warm_up: int = 0) -> Iterator[Figure]:
        """Yields the figures. warm_up: tokens that each sequence generates before the `gen` measured ones; they get a
        figure of their own."""
        for batch in batches:
            before = self.read_gb_s()
            timed = Timed(*self._measured(partial(self.prefill, batch, prompt)))
            after = self.read_gb_s()
            yield Figure.of("prefill", batch, prompt, 0, 0, timed, (before, after))
            self.decode(batch, prompt, 1)  # loads and captures a GPU's kernels for this number of rows
            for phase, first, steps in (("warm-up", 0, warm_up), ("decode", warm_up, gen)):
                if steps:
                    timed, before = self._decode_timed(batch, prompt, first, steps), after
                    after = self.read_gb_s()
                    yield Figure.of(phase, batch, prompt, first, steps, timed, (before, after))

    def _decode_timed(self, batch: int, prompt: int, first: int, steps: int) -> Timed:
        """Decodes and measures. first: index of the first decode step, counted from the end of the prompts."""
        counts = self._runner.expert_use().cache
        work = partial(self.decode, batch, prompt + first, steps, first_of_trace=first)
        seconds, read = self._measured(work)
        cache = CacheFigure.between(counts, self._runner.expert_use().cache, steps)
        if not self._runner.engine.counts_every_step:
            from moeserve.cli.bench.step_bytes import step_bytes

            last = self.decode_plan(batch, prompt + first + steps - 1)
            read = steps * step_bytes(self._runner, last)
        return Timed(seconds, read, cache)

    def read_gb_s(self) -> float:
        """Returns the GB/s of reading all experts once with all threads; on a GPU, the GB/s of a copy, reads plus
        writes."""
        seconds, read = self._runner.engine.read_weights()
        return read / seconds / 1e9

    def _measured(self, work: Callable[[], float]) -> tuple[float, int]:
        """Returns the seconds that `work` returns, and the bytes of weights read; 0 bytes if the engine does not count
        them in every step."""
        engine = self._runner.engine
        if not engine.counts_every_step:
            return work(), 0
        before = engine.weight_counters()
        return work(), engine.weight_bytes_since(before)

    def prefill(self, batch: int, prompt: int) -> float:
        """Computes the prompts, one sequence after another. Returns the seconds."""
        began = time.perf_counter()
        self.run_all(self._prefill_plans(batch, prompt))
        return time.perf_counter() - began

    def _prefill_plans(self, batch: int, prompt: int) -> Iterator[StepPlan]:
        ready = self._runner.ready()
        vocab, has_states = ready.vocab_size, ready.num_state_slots > 0
        for seq in range(batch):
            sampling = SamplingParams(max_tokens=1 << 20, temperature=self._temperature, seed=seq)
            tokens = self._random.integers(0, vocab, prompt, dtype=np.int32)
            new = [NewSeq(seq, tokens.tobytes(), prompt, b"", sampling, state_slot=seq if has_states else -1)]
            zeroed = np.array([[-1, seq]], np.int32).tobytes() if has_states else b""
            for start in range(0, prompt, self._step_tokens):
                count = min(self._step_tokens, prompt - start)
                slots = slots_in_turn(ready.kv_slot_kinds, batch, seq, start, count)
                in_window = self._windows.take(seq, start, count)
                row = Row(seq, start, count, slots, start + count == prompt, in_window)
                yield StepPlan(self.steps, new, [row], state_copies=zeroed)
                self._windows.leave(seq, start + count)
                new, zeroed = [], b""

    def decode(self, batch: int, prompt: int, gen: int, *, first_of_trace: int = 0) -> float:
        """Returns the seconds of decode steps. The steps' plans are made beforehand, because a router makes a plan
        while the previous step runs."""
        plans = [self.decode_plan(batch, position) for position in range(prompt, prompt + gen)]
        forced = self.forced(batch, gen, first_of_trace)
        began = time.perf_counter()
        self.run_all(plans if forced is None else choosing(forced, plans))
        return time.perf_counter() - began

    def forced(self, batch: int, gen: int, first: int = 0) -> ForcedRouting | None:
        """Returns the trace's tokens from `first` on, on the device. Each sequence starts at another place of the
        trace and wraps around."""
        if self._trace is None:
            return None
        from moeserve.worker.engines.gpu.engine import GpuEngine

        engine, tokens = self._runner.engine, len(self._trace.ids)
        assert isinstance(engine, GpuEngine)
        assert engine.forced_routing is not None
        starts = np.arange(batch) * tokens // batch
        engine.forced_routing.load(self._trace.ids[(first + np.arange(gen)[:, None] + starts) % tokens])
        return engine.forced_routing

    def decode_plan(self, batch: int, position: int) -> StepPlan:
        """Returns a plan that decodes one token of each sequence at `position`."""
        kinds = self._runner.ready().kv_slot_kinds
        rows = [
            Row(
                seq,
                position,
                1,
                slots_in_turn(kinds, batch, seq, position, 1),
                True,
                self._windows.take(seq, position, 1),
            )
            for seq in range(batch)
        ]
        return StepPlan(self.steps, [], rows)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        self.steps += 1
        return self._runner.step(plan)

    def run_all(self, plans: Iterable[StepPlan]) -> None:
        """Runs the plans in turn, as a server does."""
        for _ in run_in_turn(self._runner, self._counted(plans)):
            pass

    def _counted(self, plans: Iterable[StepPlan]) -> Iterator[StepPlan]:
        for plan in plans:
            yield plan
            self.steps += 1


def choosing(forced: ForcedRouting, plans: Iterable[StepPlan], first: int = 0) -> Iterator[StepPlan]:
    """Yields the plans. Before each plan, sets the routers' choices to the trace's next step, from step `first` on."""
    for step, plan in enumerate(plans, first):
        forced.choose(step)
        yield plan


def main(arguments: list[str]) -> int:
    """Returns exit code 0, or 2 with a message for bad arguments or a bad file."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    from moeserve.worker.loading.load import load_runner

    batches, prompt, gen = args.batch, args.prompt, args.gen
    try:
        config = _config(args)
        trace = None if args.routing_trace is None else read_trace(args.routing_trace)
        runner = load_runner(config, TerminalBar(), 0 if trace is None else max(batches))
        if trace is not None:
            check_fits(trace, runner)
    except UserError as error:
        parser.error(str(error))
    step_tokens = runner.ready().max_num_batched_tokens
    bench = EngineBench(runner, step_tokens, args.temperature, trace)
    # Warm-up: touches every buffer for the first time and, on a GPU, loads the kernels for the measured size.
    bench.prefill(1, min(prompt, 32 if config.device == "cpu" else step_tokens))
    use = runner.expert_use()
    warm_up = args.warm_up
    if warm_up is None:
        warm_up = 0 if use.cache is None else SETTLING_STEPS
    if not args.json:
        where = where_experts_are(use)
        print(f"{config.served_model_name}, {runner.ready().device}{where}\n{HEADER}")
    figures = []
    drafted: Iterable[Figure] = ()
    if args.acceptance:
        drafted = DraftedDecode(bench, runner, num_drafts(config)).figures(
            batches, prompt, gen, args.acceptance
        )
    for figure in chain(bench.figures(batches, prompt, gen, warm_up), drafted):
        figures.append(figure)
        print(json.dumps(dataclasses.asdict(figure)) if args.json else figure.row, flush=True)
    if args.save_result is not None:
        try:
            _save(args, config, runner.ready().device, figures)
        except OSError as error:
            parser.error(f"--save-result: {error}")
    return 0


def check_fits(trace: RoutingTrace, runner: Runner) -> None:
    """Raises ConfigError for a trace of another model's shape."""
    use = runner.expert_use()
    shape = (use.layers, use.experts, use.experts_per_token)
    if trace.shape != shape:
        raise ConfigError(
            "--routing-trace: it records {} layers of {} experts, {} per token; the model has {}, {} and {}: record "
            "one with this model".format(*trace.shape, *shape)
        )


def _save(args: argparse.Namespace, config: ServerConfig, device: str, figures: list[Figure]) -> None:
    """Writes the measured figures to the path of --save-result. Raises OSError."""
    settings = {
        "model": config.served_model_name,
        "device": device,
        "threads": config.threads,
        "temperature": args.temperature,
    }
    measured = [figure.measured for figure in figures]
    measured.append(Measured("memory read", max(f.read_gb_s for f in figures), "GB/s", higher_is_better=True))
    gpu = None if device.startswith("cpu") else device
    write_results(args.save_result, results_of("bench engine", settings, measured, gpu))


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve bench engine",
        usage="%(prog)s [options]",
        description="Measure prefill and decode of the engine, without the server.",
        allow_abbrev=False,
    )
    add_shared_options(parser, SHARED)
    parser.add_argument(
        "--prompt", type=_COUNT, default=512, metavar="N", help="prompt tokens per sequence (default: 512)"
    )
    parser.add_argument(
        "--gen", type=_COUNT, default=64, metavar="N", help="generated tokens per sequence (default: 64)"
    )
    parser.add_argument(
        "--warm-up",
        type=whole(0, 1 << 20),
        metavar="N",
        help="tokens to generate per sequence before those of --gen, reported on their own, because an expert cache "
        f"still holds the experts of earlier texts then (default: {SETTLING_STEPS} with an expert cache, else 0)",
    )
    parser.add_argument(
        "--batch",
        type=_counts,
        default=[1, 2, 4, 8, 16],
        metavar="N,N",
        help="numbers of sequences to compute together, one measurement for each (default: 1,2,4,8,16)",
    )
    parser.add_argument(
        "--temperature",
        type=real(0.0, 2.0),
        default=0.0,
        metavar="T",
        help=(
            "sampling temperature (default: 0, greedy; models with random weights then repeat themselves, so that "
            "streams share more experts than with real texts: use 1 for them)"
        ),
    )
    parser.add_argument(
        "--routing-trace",
        type=Path,
        metavar="FILE",
        help=(
            "use the experts of this file in decode steps instead of the routers' choice, which has no locality with "
            "random weights; `moeserve bench trace` writes such a file; GPU only"
        ),
    )
    add_acceptance(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of a table"
    )
    parser.add_argument(
        "--save-result",
        type=Path,
        metavar="FILE",
        help="also write the figures as JSON, for benchmarks.compare (the form is in moeserve/cli/bench/results.py)",
    )
    return parser


def _config(args: argparse.Namespace) -> ServerConfig:
    """Returns the configuration. Chooses the device here, once, because each choice logs a GPU that cannot be used."""
    from moeserve.worker.loading.device import choose_device

    config = resolve(read_options({name: getattr(args, name) for name in SHARED}, os.environ))
    device = choose_device(config.device)
    warm_up = args.warm_up
    if warm_up is None:  # only placement decides whether the expert cache is on
        warm_up = SETTLING_STEPS if device != "cpu" and config.expert_cache != "off" else 0
    if args.acceptance and not num_drafts(config):
        raise ConfigError("--acceptance: there are no drafts; say how many with --speculative-config")
    most = max(args.batch)
    length = args.prompt + warm_up + args.gen + 1
    if args.acceptance:
        length = max(length, args.prompt + room_of(args.gen, num_drafts(config)) + 1)
    return dataclasses.replace(
        config,
        device=device,
        max_num_seqs=most,
        max_model_len=length,
        max_total_tokens=max(64, most * length),
    )


_COUNT = whole(1, 1 << 20)


def _counts(text: str) -> list[int]:
    return [_COUNT(part) for part in text.split(",")]


class TerminalBar:
    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(desc=stage, total=total, unit="B", unit_scale=True, disable=None, leave=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
