"""The command line of `moeserve simulate`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from moeserve.cli.command_line import add_shared_options
from moeserve.cli.simulate.worker import PAGE_TOKENS, Timing
from moeserve.cli.workload.options import add_judgement_options, add_workload_options, real, whole
from moeserve.config import ServerConfig
from moeserve.messages.pages import Tier

# Options of the server that have the same meaning here.
SHARED = tuple(
    option.name
    for option in dataclasses.fields(ServerConfig)
    if (option.metadata["group"] == "Capacity" or option.name == "max_model_len")
    # Not offered: options in bytes, which virtual KV and states do not have.
    and option.name
    not in ("kv_window_ratio", "state_snapshot_budget", "kv_cache_dtype", "kv_ram", "kv_disk", "kv_disk_gib")
)

# Seconds, of the packaged model's server on two Zen 5 cores: medians of one request at a time, and of eight streams
# (gap). frontend and connect on 16 cores: docs/results/planner.md.
DEFAULT_TIMING = Timing(frontend=0.0005, reply=0.001, hop=0.0003, gap=0.00015, connect=0.0008)
# Tokens whose KV is read and written per second. RAM: 48 layers of 2 KiB a token, assumed at 25 GB/s, and measured
# (docs/results/planner.md). The disk: 12 layers, from the page cache and to a virtual disk of a busy machine.
RAM_RATES = (250_000.0, 400_000.0)
DISK_RATES = (9400.0, 14_000.0)
RAM_STEP_TOKENS = 672  # whole pages within 64 MiB of 48 layers
TIMES = {
    "frontend": "milliseconds that httpserver takes for each request; it processes one at a time",
    "reply": "milliseconds from the router to the client, for each token",
    "hop": "milliseconds from the router to an idle worker and back",
    "gap": "milliseconds between two steps",
    "connect": "milliseconds that the client takes to open a connection; simultaneous requests open all connections "
    "first",
    "token_cpu": "milliseconds that each token adds to a step because the other processes use the worker's cores",
}


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve simulate",
        usage="%(prog)s --max-total-tokens N [options]",
        description="Run the scheduler under a workload in virtual time and report what users would see.",
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server (see `moeserve --help`)")
    add_shared_options(
        server,
        SHARED,
        max_model_len="maximum tokens of one request, prompt and answer together (default: the size of the KV pool)",
        max_total_tokens="size of the KV pool, in tokens; required; a server logs its own when it is ready",
    )
    _add_engine_options(parser)
    add_workload_options(parser)
    add_judgement_options(parser)
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--step-time",
        type=Path,
        metavar="FILE",
        help="step-time model, from `moeserve bench steps --output FILE` (default: 12 layers of "
        "Qwen3-30B-A3B in Q4_K_M on two Zen 5 cores)",
    )
    ms = real(0, 1e6)
    engine.add_argument(
        "--base-ms",
        type=ms,
        metavar="MS",
        help="fixed milliseconds of every step, in place of --step-time (default: 0 if --token-ms is given)",
    )
    engine.add_argument(
        "--token-ms",
        type=ms,
        metavar="MS",
        help="milliseconds that each token adds to its step, in place of --step-time (default: 0 if --base-ms is "
        "given)",
    )
    engine.add_argument(
        "--max-tokens",
        type=whole(1, 1 << 24),
        metavar="N",
        help=(
            "max_tokens of the simulated requests; an answer still ends at its own length (default: max_tokens is the "
            "answer's length)"
        ),
    )
    engine.add_argument(
        "--num-state-slots",
        type=whole(0, 1 << 20),
        default=0,
        metavar="N",
        help=(
            "number of slots for recurrent states, of running requests and snapshots together; a server logs its own "
            "number (default: 0, a model without recurrent state)"
        ),
    )
    _add_tier_options(engine, "ram", "in RAM", "copied to the GPU", "copied from the GPU", RAM_RATES)
    engine.add_argument(
        "--ram-step-tokens",
        type=whole(PAGE_TOKENS, 1 << 30),
        default=RAM_STEP_TOKENS,
        metavar="N",
        help="maximum number of tokens whose KV is copied from the GPU in one step while answers wait; copying "
        f"lengthens the step (default: {RAM_STEP_TOKENS}, which are 64 MiB with 48 layers of 2 KiB a token)",
    )
    _add_tier_options(engine, "disk", "on disk", "read", "written", DISK_RATES)
    engine.add_argument(
        "--state-tokens",
        type=real(0, 1e9),
        default=0.0,
        metavar="N",
        help="tokens whose KV takes as much memory as one recurrent state in a tier (default: 0)",
    )
    for name, value in dataclasses.asdict(DEFAULT_TIMING).items():
        flag = f"--{name.replace('_', '-')}-ms"
        text = f"{TIMES[name]} (default: {value * 1e3:g})"
        engine.add_argument(flag, type=ms, default=value * 1e3, metavar="MS", help=text)


def _add_tier_options(
    engine: argparse._ArgumentGroup,
    tier: Tier,
    where: str,
    read: str,
    written: str,
    rates: tuple[float, float],
) -> None:
    """Adds the options of the tiers. rates: tokens whose KV is read and written per second."""
    engine.add_argument(
        f"--{tier}-tokens",
        type=whole(PAGE_TOKENS, 1 << 40),
        default=0,
        metavar="N",
        help=f"size of the prefix cache's tier {where} (--kv-{tier}), in tokens, as `moeserve plan` counts them "
        "(default: 0, no tier)",
    )
    rate = real(0, 1e12, above=True)
    engine.add_argument(
        f"--{tier}-tokens-per-s",
        type=rate,
        default=rates[0],
        metavar="R",
        help=f"number of tokens whose KV is {read} per second (default: {rates[0]:g})",
    )
    engine.add_argument(
        f"--{tier}-written-per-s",
        type=rate,
        default=rates[1],
        metavar="R",
        help=f"number of tokens whose KV is {written} per second (default: {rates[1]:g})",
    )
