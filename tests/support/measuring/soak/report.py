"""What soaks have found: counts, memory and a verdict.

    python -m benchmarks.soak --report soak-1.json soak-2.json ...

adds up what `python -m benchmarks.soak --summary` has written, of runs with different seeds. The exit code is 1 where
one of them has lost something.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.support.measuring.soak.ledger import Ledger

GROWN: Final = 1.05


class Summary(msgspec.Struct):
    """The summary of one run. Memory is resident bytes by process, after the first and after the last of `requests`
    without faults; empty where there were none."""

    seed: int
    faults: dict[str, int] = {}
    answered: int = 0
    excused: dict[str, int] = {}  # requests, by loss and fault
    lost: list[str] = []
    had_full_directory: bool = True
    requests: int = 0
    memory_at_first: dict[str, int] = {}
    memory_at_last: dict[str, int] = {}

    def take(self, ledger: Ledger, *, had_full_directory: bool) -> None:
        self.faults, self.answered, self.excused = dict(ledger.faults), ledger.answered, dict(ledger.excused)
        self.lost, self.had_full_directory = ledger.lost, had_full_directory


def growth(at_first: dict[str, int], at_last: dict[str, int]) -> list[str]:
    return [
        f"{name:<24}{at_first.get(name, 0) / 2**20:>8.1f} MiB{size / 2**20:>8.1f} MiB"
        f"{100 * (size / at_first[name] - 1) if name in at_first else math.inf:>+7.1f}%"
        for name, size in sorted(at_last.items())
    ]


def grown(at_first: dict[str, int], at_last: dict[str, int]) -> list[str]:
    """The names of those that have become too large, or were not there at first."""
    return [name for name, size in sorted(at_last.items()) if size > GROWN * at_first.get(name, 0)]


def report(summaries: Sequence[Summary]) -> list[str]:
    """The table, and the verdict as the last line."""
    faults = _total(summary.faults for summary in summaries)
    answered = sum(summary.answered for summary in summaries)
    lost = [*itertools.chain.from_iterable(summary.lost for summary in summaries)]
    lines = [f"{count:>8}  {kind}" for kind, count in sorted(faults.items())]
    lines += [f"{faults.total():>8}  FAULTS", f"{answered:>8}  ANSWERS, each as undisturbed"]
    excused = _total(summary.excused for summary in summaries)
    lines += [f"{count:>8}  excused: {cause}" for cause, count in sorted(excused.items())]
    lines += [f"    LOST  {text}" for text in lost]
    if not all(summary.had_full_directory for summary in summaries):
        lines.append("a full runtime directory was left out: no file system could be mounted")
    return [*lines, f"verdict: {'something was lost' if lost else 'nothing was lost'}"]


def _total(counts: Iterable[dict[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Adds up what several soaks have found.")
    parser.add_argument("summaries", type=Path, nargs="+", help="files that --summary has written")
    args = parser.parse_args(arguments)
    summaries = [msgspec.json.decode(path.read_bytes(), type=Summary) for path in args.summaries]
    for summary in summaries:
        if summary.memory_at_last:
            print(f"seed {summary.seed}, memory within {summary.requests} requests without faults:")
            print("\n".join(growth(summary.memory_at_first, summary.memory_at_last)))
    print("\n".join(report(summaries)))
    return int(any(summary.lost for summary in summaries))


if __name__ == "__main__":
    raise SystemExit(main())
