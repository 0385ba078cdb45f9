"""The simulator beside the server it stands for: the same trace through both, and the ratios of what users saw.

    python -m benchmarks.simulator --model model.gguf

The step-time model is measured before the server runs and again after it, since a shared machine changes by the minute;
both are simulated and shown, and the ratio is that of their mean to the real run. For each case `bench serve` puts a
trace on the server, then `simulate` gets the same trace and the same server flags.

Where the engine has as many threads as there are cores, what the other processes do for a token is taken from its
steps: their CPU time is measured during the run and given to the simulator.

On a busy machine the figures mean nothing: steps of two threads that others interrupt take several times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.server import REPOSITORY, Server, clean_environment, running_server, title_of
from moeserve.processes.cpus import usable_cores

FIGURES = (
    "output_throughput",
    "request_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "mean_itl_ms",
    "p90_itl_ms",
    "mean_e2el_ms",
)
BATCH = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256")
SERVER = (*BATCH, "--max-total-tokens", "16384")
CASES = {
    "poisson": "--num-prompts 24 --input-len 200 --output-len 40 --range-ratio 0.5 --request-rate 0.8",
    "8 at once": "--num-prompts 32 --input-len 100 --output-len 40 --range-ratio 0.5 --max-concurrency 8",
    "long among short": "--num-prompts 20 --input-len 50 --output-len 40 --long-every 7 --long-input-len 1500 "
    "--request-rate 1",
    "conversations": "--num-prompts 24 --num-turns 4 --prefix-len 300 --input-len 60 --output-len 30 --think-time 1 "
    "--request-rate 0.5",
}

Figures = dict[str, Any]


def moeserve(*arguments: object) -> None:
    """Runs a command of ours. Raises CalledProcessError."""
    command = [sys.executable, "-m", "moeserve", *map(str, arguments)]
    subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), check=True, stdout=subprocess.DEVNULL)


def measure_steps(model: Path, to: Path) -> None:
    moeserve("bench", "steps", "--model", model, *BATCH, "--long-prompt", 2048, "--output", to)


def serve(model: Path, case: str, folder: Path) -> Figures:
    """The real figures, and "token_cpu_ms"; leaves the trace in the folder."""
    result = folder / "real.json"
    with running_server(model, *SERVER, ready_timeout=300) as server:
        before = cpu_seconds(server)
        moeserve(
            *(
                "bench",
                "serve",
                "--url",
                server.base_url,
                *CASES[case].split(),
                "--save-trace",
                folder / "trace.jsonl",
            ),
            *("--ignore-eos", "--save-result", result, "--metric-percentiles", "90,99"),
        )
        spent = cpu_seconds(server) - before
    real: Figures = json.loads(result.read_bytes())
    spent += real["client_cpu_us_per_token"] * real["total_output_tokens"] / 1e6
    shared = usable_cores() >= (os.cpu_count() or 1)
    return real | {
        "token_cpu_ms": 1e3 * spent / real["total_output_tokens"] / usable_cores() if shared else 0.0
    }


def cpu_seconds(server: Server) -> float:
    """Of the server's processes but the worker, so far."""
    times = [p.cpu_times() for p in server.family if title_of(p) != "moeserve: worker"]
    return float(sum(t.user + t.system for t in times))


def simulate(case: str, steps: Path, folder: Path, token_cpu_ms: float) -> Figures:
    result = folder / "simulated.json"
    concurrency = CASES[case].partition("--max-concurrency ")[1:]
    moeserve(
        *("simulate", *SERVER, "--trace", folder / "trace.jsonl", *"".join(concurrency).split()),
        *("--step-time", steps, "--save-result", result, "--metric-percentiles", "90,99"),
        *("--token-cpu-ms", token_cpu_ms),
    )
    return dict(json.loads(result.read_bytes()))


def compare(model: Path, case: str, folder: Path) -> tuple[Figures, Figures, Figures]:
    """Real, simulated with the steps measured before, and with those measured after."""
    before, after = folder / "before.json", folder / "after.json"
    measure_steps(model, before)
    real = serve(model, case, folder)
    measure_steps(model, after)
    token_cpu = real["token_cpu_ms"]
    return real, simulate(case, before, folder, token_cpu), simulate(case, after, folder, token_cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated (default: all)")
    args = parser.parse_args()
    for case in args.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            real, before, after = compare(args.model, case, Path(folder))
        print(f"\n{case:<22}{'real':>10}{'simulated before':>18}{'after':>10}{'ratio':>8}")
        for name in FIGURES:
            mean = (before[name] + after[name]) / 2
            print(
                f"{name:<22}{real[name]:>10.2f}{before[name]:>18.2f}{after[name]:>10.2f}{mean / real[name]:>8.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
