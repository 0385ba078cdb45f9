"""Shows a run's figures as a table (that of `vllm bench serve`) and stores them as a JSON file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from moeserve.cli.workload.metrics import METRICS, Outcome

WIDTH = 50
SHOWN_REASONS = 5
TableRow = tuple[str, float | int | str]

_TOTALS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_cached_tokens": "  of them from the prefix cache:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}


def table(
    summary: dict[str, Any], title: str, percentiles: Sequence[float], more: dict[str, list[TableRow]]
) -> str:
    """Returns the table. `more`: further sections, by title."""
    lines = [f"{f' {title} ':=^{WIDTH}}"]
    lines += [_line(label, summary[name]) for name, label in _TOTALS.items() if summary[name] is not None]
    for name, heading in METRICS.items():
        lines.append(f"{heading:-^{WIDTH}}")
        for prefix, word in [
            ("mean", "Mean"),
            ("median", "Median"),
            *((f"p{p:g}", f"P{p:g}") for p in percentiles),
        ]:
            lines.append(_line(f"{word} {name.upper()} (ms):", summary[f"{prefix}_{name}_ms"]))
    for heading, rows in more.items():
        lines.append(f"{heading:-^{WIDTH}}")
        lines += [_line(label, value) for label, value in rows]
    return "\n".join([*lines, "=" * WIDTH])


def _line(label: str, value: float | int | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def failures(outcomes: Sequence[Outcome]) -> str:
    """Returns a line for each reason for which requests failed, most frequent first. Reasons that differ only in
    numbers are one."""
    alike: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error:
            alike.setdefault(re.sub(r"\d+", "0", outcome.error), []).append(outcome.error)
    most = sorted(alike.values(), key=len, reverse=True)[:SHOWN_REASONS]
    return "".join(f"{len(errors)} x {errors[0]}\n" for errors in most)


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Returns each request's times, as parallel lists in seconds, by vLLM's names."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "cached_lens": [outcome.cached_tokens for outcome in outcomes],
        "start_times": [outcome.sent for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls.tolist() for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes the result as indented JSON. Raises OSError."""
    path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
