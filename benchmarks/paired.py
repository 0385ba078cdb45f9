"""Two checkouts' engines in turn, a fraction of a second each: what a change costs on a machine that is not quiet.

    python -m benchmarks.paired --base ../before --new . --model model.gguf [--batch 1,8] [--prompt 512] [--rounds 20]

Both engines are loaded, each in a process of its own with its checkout on the path, and wait; then each does the same
work in turn, base new new base, so that what else the machine does meets both alike. Speeds of runs that lie minutes
apart differ by tens of percent on a shared machine, of runs that lie a second apart by a few.

Printed for each kind of work: the median of the ratios new over base of tokens a second, pair by pair, with the 90%
interval of that median by bootstrap. Both checkouts need their C++ module built, in moeserve/kernels where this
Python's editable install is not theirs; both must have moeserve/cli/bench/engine.py with EngineBench.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.support.servers.server import imports_from

# What each process runs: it answers each line "prefill B P" or "decode B P G" with the seconds it took.
_ENGINE = """
import sys
from moeserve.cli.bench import engine as bench
from moeserve.worker.loading.load import load_runner
args = bench.command_parser().parse_args(sys.argv[1:])
runner = load_runner(bench._config(args), lambda stage, done, total: None)
driver = bench.EngineBench(runner, runner.ready().max_num_batched_tokens, args.temperature)
driver.prefill(1, min(args.prompt, 32))
print("ready", file=sys.stderr, flush=True)
for line in sys.stdin:
    work, *numbers = line.split()
    seconds = getattr(driver, work)(*map(int, numbers))
    print(seconds, file=sys.stderr, flush=True)
"""


class Engine:
    """One checkout's engine. RuntimeError with the last line it wrote where it ends."""

    def __init__(self, checkout: Path, python: str, arguments: list[str]) -> None:
        environment = os.environ | imports_from(checkout)
        self._process = subprocess.Popen(
            [python, "-c", _ENGINE, *arguments],
            cwd=checkout,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._last = ""
        while self._line() != "ready":
            pass

    def seconds(self, work: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if not line:
            raise RuntimeError(f"the engine ended: {self._last}")
        self._last = line.strip()
        return self._last

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def median_interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and the 5th and 95th percentile of 2,000 medians of resamples."""
    values = np.array(ratios)
    samples = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), (5, 95))
    return float(np.median(values)), float(low), float(high)


def _ratios(base: Engine, new: Engine, work: str, rounds: int) -> list[float]:
    ratios = []
    for number in range(rounds):
        order = (base, new) if number % 2 == 0 else (new, base)
        took = {engine: engine.seconds(work) for engine in order}
        ratios.append(took[base] / took[new])
        time.sleep(0.05)
    return ratios


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.paired", description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="checkout of before")
    parser.add_argument(
        "--new", type=Path, default=Path(), metavar="DIR", help="checkout of after (default: this one)"
    )
    parser.add_argument("--model", type=Path, required=True, metavar="PATH")
    parser.add_argument("--batch", default="1,8", metavar="N,N")
    parser.add_argument("--prompt", type=int, default=512, metavar="N")
    parser.add_argument("--gen", type=int, default=8, metavar="N", help="decode steps of a turn (default: 8)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="turns of each (default: 20)")
    args, engine_arguments = parser.parse_known_args(arguments)
    batches = [int(part) for part in args.batch.split(",")]
    shared = ["--model", str(args.model.resolve()), "--batch", args.batch, *engine_arguments]
    shared += ["--prompt", str(args.prompt), "--gen", str(args.gen)]
    base, new = (Engine(path.resolve(), sys.executable, shared) for path in (args.base, args.new))
    print(f"{'work':<36}{'new/base':>9}{'90% of the median':>20}")
    for work in [
        f"prefill 1 {args.prompt}",
        *(f"decode {batch} {args.prompt} {args.gen}" for batch in batches),
    ]:
        if work.startswith("decode"):
            for engine in (base, new):
                engine.seconds(f"prefill {work.split()[1]} {args.prompt}")
        median, low, high = median_interval(_ratios(base, new, work, args.rounds))
        print(f"{work:<36}{median:>9.3f}{f'{low:.3f} to {high:.3f}':>20}", flush=True)
    base.close()
    new.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
