"""The options that describe the workload and its objectives; the same for `bench serve` and `simulate`.

Names are those of `vllm bench serve` if it has the option, also its longer names (`--random-input-len`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeserve.cli.workload.metrics import parse_goodput
from moeserve.cli.workload.shapes import CASES, DATASETS, WorkloadShape, generate
from moeserve.cli.workload.trace import MAX_SECONDS, MAX_TOKENS, Workload, read_trace, write_trace
from moeserve.errors import ConfigError


def whole(low: int, high: int) -> Callable[[str], int]:
    """Returns an argparse type: a whole number in low .. high."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, not {text}")
        return value

    return parse


def real(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Returns an argparse type: a number in low .. high; `above`: low itself is excluded."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number without a unit, not {text!r}") from None
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(
                f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
            )
        return value

    return parse


DEFAULT_NUM_PROMPTS = 1000
_TOKENS = whole(1, MAX_TOKENS)
_COUNT = whole(1, 1 << 20)

# Options of the shape: option strings, type, help. The default is the preset's.
_SHAPE: dict[str, tuple[tuple[str, ...], Callable[[str], Any], str]] = {
    "input_len": (
        ("--input-len", "--random-input-len", "--prefix-repetition-suffix-len"),
        _TOKENS,
        "new prompt tokens a request, after the prefix or the history",
    ),
    "output_len": (
        ("--output-len", "--random-output-len", "--prefix-repetition-output-len"),
        _TOKENS,
        "tokens to generate per request",
    ),
    "range_ratio": (
        ("--range-ratio", "--random-range-ratio"),
        real(0, 0.999),
        "both lengths vary uniformly between length x (1 - ratio) and length x (1 + ratio)",
    ),
    "prefix_len": (
        ("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len"),
        whole(0, MAX_TOKENS),
        "tokens of the prefix that all prompts of a group share, before their new tokens",
    ),
    "num_prefixes": (
        ("--num-prefixes", "--prefix-repetition-num-prefixes"),
        _COUNT,
        "number of groups of prompts, each with a prefix of its own",
    ),
    "num_turns": (
        ("--num-turns",),
        _COUNT,
        "requests per conversation; each prompt continues the one before with its answer",
    ),
    "think_time": (
        ("--think-time",),
        real(0, MAX_SECONDS),
        "mean seconds between an answer and the conversation's next turn (exponential)",
    ),
    "long_input_len": (("--long-input-len",), _TOKENS, "new prompt tokens of a long request"),
    "long_every": (("--long-every",), whole(0, 1 << 20), "every N-th request is long; 0: none"),
}
# The first option has no effect without the second.
_NEEDS = {"num_prefixes": "prefix_len", "long_input_len": "long_every"}


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name",
        "--dataset",
        choices=DATASETS,
        metavar="NAME",
        help=f"kind of workload, which sets the defaults of the options below: {', '.join(DATASETS)} (default: random)",
    )
    counts = [f"{name}: {case.num_prompts}" for name, case in CASES.items()]
    group.add_argument(
        "--num-prompts",
        type=whole(1, 10_000_000),
        metavar="N",
        help=f"total number of requests (default: {'; '.join([str(DEFAULT_NUM_PROMPTS), *counts])})",
    )
    for name, (flags, kind, text) in _SHAPE.items():
        group.add_argument(
            *flags, dest=name, type=kind, metavar="N", help=f"{text} (default: {_defaults(name)})"
        )
    group.add_argument(
        "--request-rate",
        type=real(0, math.inf, above=True),
        metavar="R",
        help=(
            "conversations that begin per second (a single request is a conversation of one turn); inf: all at once "
            "(default: inf)"
        ),
    )
    group.add_argument(
        "--burstiness",
        type=real(0, 1e6, above=True),
        metavar="B",
        help=(
            "shape of the gamma-distributed gaps between arrivals: 1 is a Poisson process, smaller values give bursts "
            "(default: 1)"
        ),
    )
    group.add_argument(
        "--trace",
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="replay the requests of this JSONL file at their times instead of generating some",
    )
    group.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write the run's requests to a JSONL file that --trace can replay",
    )
    group.add_argument(
        "--seed", type=whole(0, 1 << 62), default=0, help="seed of lengths, tokens and arrivals (default: 0)"
    )
    group.add_argument(
        "--max-concurrency",
        type=_COUNT,
        metavar="N",
        help="maximum number of requests in progress; more wait at the client (default: no limit)",
    )


def add_judgement_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=(
            "limits in milliseconds that a request must keep to count as good, such as ttft:500 itl:100; metrics: "
            "ttft, tpot, itl, e2el"
        ),
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="P,P",
        help="percentiles to report of each metric (default: 99)",
    )
    group.add_argument(
        "--save-result", type=Path, metavar="FILE", help="write the figures as JSON with vLLM's names"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="with --save-result: also write each request's figures"
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="draw the distributions of TTFT and ITL, and tokens and requests over time, as an SVG file",
    )


def _defaults(name: str) -> str:
    usual = getattr(WorkloadShape(), name)
    others = [
        f"{preset}: {getattr(shape, name):g}"
        for preset, shape in DATASETS.items()
        if getattr(shape, name) != usual
    ]
    return "; ".join([f"{usual:g}", *others])


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("must be between 0 and 100")
    return values


def workload_from(args: argparse.Namespace) -> Workload:
    """Returns the workload that the options describe, and saves it if they say so. Raises UserError, OSError."""
    given = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    if args.trace is not None:
        others = ["dataset_name", "num_prompts", *given, "request_rate", "burstiness"]
        clash = [name for name in others if getattr(args, name) is not None]
        if clash:
            raise ConfigError(f"--{clash[0].replace('_', '-')} has no effect beside --trace; leave it out")
        workload = read_trace(args.trace, args.seed)
    else:
        workload = generate(_shape(args, given), _num_prompts(args), *_arrivals(args), args.seed)
    if args.save_trace is not None:
        write_trace(args.save_trace, workload)
    return workload


def _num_prompts(args: argparse.Namespace) -> int:
    case = CASES.get(args.dataset_name)
    return args.num_prompts or (DEFAULT_NUM_PROMPTS if case is None else case.num_prompts)


def _shape(args: argparse.Namespace, given: dict[str, Any]) -> WorkloadShape:
    shape = dataclasses.replace(DATASETS[args.dataset_name or "random"], **given)
    for name, needed in _NEEDS.items():
        if name in given and not getattr(shape, needed):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without --{needed.replace('_', '-')}; add that, or leave "
                "this out"
            )
    if "think_time" in given and shape.num_turns == 1:
        raise ConfigError("--think-time has no effect without --num-turns; add that, or leave this out")
    return shape


def _arrivals(args: argparse.Namespace) -> tuple[float, float]:
    rate = math.inf if args.request_rate is None else args.request_rate
    if args.burstiness is not None and math.isinf(rate):
        raise ConfigError("--burstiness has no effect without --request-rate; add that, or leave this out")
    return rate, 1.0 if args.burstiness is None else args.burstiness


def objectives_from(args: argparse.Namespace) -> dict[str, float]:
    """Returns the latency objectives of the arguments. Raises ConfigError for an unknown metric, a limit that is no
    finite number, --save-detailed without --save-result, and a --plot that does not end in .svg."""
    if args.save_detailed and args.save_result is None:
        raise ConfigError("--save-detailed has no effect without --save-result; add that, or leave this out")
    if args.plot is not None and args.plot.suffix != ".svg":
        raise ConfigError(f"--plot: {args.plot} must end in .svg")
    return parse_goodput(args.goodput)
