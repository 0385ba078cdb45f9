"""`moeserve simulate`: runs the scheduler under a workload in virtual time; a step-time model replaces the worker."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moeserve.cli.command_line import read_options
from moeserve.cli.simulate.options import SHARED, TIMES, command_parser
from moeserve.cli.simulate.simulation import Simulation, SimulationResult
from moeserve.cli.simulate.step_time import StepTime, read_step_time
from moeserve.cli.simulate.tiers import TierModel
from moeserve.cli.simulate.worker import Timing, virtual_ready
from moeserve.cli.workload.metrics import summarize
from moeserve.cli.workload.options import (
    objectives_from,
    workload_from,
)
from moeserve.cli.workload.plot import write_plot
from moeserve.cli.workload.report import TableRow, details, failures, save, table
from moeserve.cli.workload.shapes import WITH_PICTURES
from moeserve.errors import ConfigError, UserError
from moeserve.messages.pages import Tier
from moeserve.messages.router_metrics import LoadReport
from moeserve.placement.step_tokens import ON_CPU
from moeserve.router.__main__ import limits


def main(arguments: list[str]) -> int:
    """Returns exit code 0, or 1 if every request failed. Exits with 2 and a message for bad arguments."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        simulation = _simulation(args)
        objectives = objectives_from(args)
        began = time.perf_counter()
        with tqdm(
            total=simulation.workload.num_requests, unit="req", disable=args.disable_tqdm or None
        ) as bar:
            result = dataclasses.replace(simulation, on_end=bar.update).run()
        wall = time.perf_counter() - began
        summary = summarize(result.outcomes, result.duration, args.metric_percentiles, objectives)
        _report(args, simulation, result, summary, wall)
    except (UserError, OSError) as error:
        parser.error(str(error))
    return 1 if all(outcome.error for outcome in result.outcomes) else 0


def _simulation(args: argparse.Namespace) -> Simulation:
    """Builds the simulation that the options describe. Raises UserError, OSError."""
    config = read_options({name: getattr(args, name) for name in SHARED}, os.environ)
    if config.max_total_tokens is None:
        raise ConfigError(
            "--max-total-tokens is missing; give the size of the KV pool in tokens, which the server logs when it is "
            "ready"
        )
    if args.dataset_name == WITH_PICTURES:
        raise ConfigError(f"--dataset-name {WITH_PICTURES}: pictures are not simulated; choose another")
    step_time = _step_time(args)
    tiers: dict[Tier, TierModel] = {}
    if args.ram_tokens:
        rates = args.ram_tokens_per_s, args.ram_written_per_s
        tiers["ram"] = TierModel(args.ram_tokens, *rates, args.state_tokens)
    if args.disk_tokens:
        rates = args.disk_tokens_per_s, args.disk_written_per_s
        tiers["disk"] = TierModel(args.disk_tokens, *rates, args.state_tokens)
    ready = virtual_ready(
        num_kv_slots=config.max_total_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len or config.max_total_tokens, config.max_total_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens or step_time.step_tokens or ON_CPU,
        num_experts=step_time.num_experts,
        experts_per_token=step_time.experts_per_token,
        num_state_slots=args.num_state_slots,
        tiers=tiers.keys(),
        prompts_first=step_time.prompts_first,
        ram_step_tokens=args.ram_step_tokens if args.ram_tokens else 0,
    )
    return Simulation(
        workload=workload_from(args),
        limits=limits(config, ready),
        step_time=step_time,
        timing=Timing(**{name: getattr(args, f"{name}_ms") / 1e3 for name in TIMES}),
        max_concurrency=args.max_concurrency,
        max_tokens=args.max_tokens,
        tiers=tiers,
    )


def _step_time(args: argparse.Namespace) -> StepTime:
    by_parameters = args.base_ms is not None or args.token_ms is not None
    if by_parameters and args.step_time is not None:
        raise ConfigError("--base-ms and --token-ms have no effect beside --step-time; leave them out")
    if by_parameters:
        base, token = (args.base_ms or 0.0) / 1e3, (args.token_ms or 0.0) / 1e3
        return StepTime("parameters", [0, 1], [base, base + token])
    return read_step_time(args.step_time or default_step_time())


def default_step_time() -> Path:
    return Path(str(importlib.resources.files("moeserve") / "assets" / "step-time-12-layers-2-cores.json"))


def _report(
    args: argparse.Namespace,
    simulation: Simulation,
    result: SimulationResult,
    summary: dict[str, Any],
    wall: float,
) -> None:
    more = _scheduling(simulation, result) | {"wall_seconds": wall}
    rows: list[TableRow] = [(f"{_LABELS[name]}:", value) for name, value in more.items()]
    print(table(summary, "Simulation Result", args.metric_percentiles, {"Scheduling": rows}))
    print(failures(result.outcomes), file=sys.stderr, end="")
    if args.save_result is not None:
        saved = {"step_time": simulation.step_time.source, **summary, **more}
        save(args.save_result, saved | (details(result.outcomes) if args.save_detailed else {}))
    if args.plot is not None:
        write_plot(args.plot, f"simulation: {simulation.step_time.source}", result.outcomes)


_LABELS = {
    "mean_num_running": "Mean requests running",
    "max_num_running": "Peak requests running",
    "mean_num_waiting": "Mean requests waiting",
    "max_num_waiting": "Peak requests waiting",
    "mean_kv_usage": "Mean KV usage",
    "max_kv_usage": "Peak KV usage",
    "num_preemptions": "Preemptions",
    "repeated_tokens": "Tokens recomputed after them",
    "prefix_cache_hit_rate": "Prompt tokens from the cache",
    "ram_hit_rate": "Prompt tokens from RAM",
    "ram_load_seconds": "Time of reading these (s)",
    "ram_declined": "Prompts computed though in RAM",
    "disk_hit_rate": "Prompt tokens from disk",
    "disk_load_seconds": "Time of reading them (s)",
    "disk_declined": "Prompts computed though on disk",
    "state_snapshot_hits": "Requests continued from a snapshot",
    "state_snapshot_evictions": "Snapshots evicted for another",
    "num_steps": "Steps",
    "mean_step_tokens": "Mean tokens in a step",
    "mean_step_ms": "Mean step (ms)",
    "worker_usage": "Share of time in steps",
    "wall_seconds": "Simulated in (s)",
}


def _snapshots(report: LoadReport) -> dict[str, float | int]:
    if not report.state_slots_total:
        return {}
    return {
        "state_snapshot_hits": report.state_snapshot_hits,
        "state_snapshot_evictions": report.state_snapshot_evictions,
    }


def _tiers(simulation: Simulation, report: LoadReport) -> dict[str, float | int]:
    figures: dict[str, float | int] = {}
    for name in simulation.tiers or {}:
        counts = report.ram if name == "ram" else report.disk
        figures |= {
            f"{name}_hit_rate": counts.tokens / max(report.prompt_tokens, 1),
            f"{name}_load_seconds": counts.load_ms / 1e3,
            f"{name}_declined": counts.declined,
        }
    return figures


def _scheduling(simulation: Simulation, result: SimulationResult) -> dict[str, float | int]:
    """Returns the scheduling figures that the server's metrics would show."""
    report, duration = result.report, result.duration
    slots, steps = simulation.limits.num_kv_slots, max(report.steps, 1)
    return {
        "mean_num_running": result.running.mean(duration),
        "max_num_running": int(result.running.most),
        "mean_num_waiting": result.waiting.mean(duration),
        "max_num_waiting": int(result.waiting.most),
        "mean_kv_usage": result.kv_slots.mean(duration) / slots,
        "max_kv_usage": result.kv_slots.most / slots,
        "num_preemptions": report.preemptions,
        "repeated_tokens": report.repeated_tokens,
        "prefix_cache_hit_rate": report.cached_tokens / max(report.prompt_tokens, 1),
        **_tiers(simulation, report),
        **_snapshots(report),
        "num_steps": report.steps,
        "mean_step_tokens": result.step_tokens / steps,
        "mean_step_ms": result.worker_busy / steps * 1e3,
        "worker_usage": result.worker_busy / duration,
    }
