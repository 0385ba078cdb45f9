"""Compares the figures of two runs of one benchmark: a table of ratios, and what became worse.

    moeserve bench engine --save-result new.json
    python -m benchmarks.compare benchmarks/baselines/BASE.json new.json [--tolerance 0.05]

The files have the form of moeserve/cli/bench/results.py. A ratio above 1 is better, whichever way the figure counts.
Exit code 0; 1 where a figure is worse by more than the tolerance, or is missing in the new file; 2 for a file that
cannot be read or another benchmark's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from moeserve.cli.bench.results import Measured, Results, ResultsError, read_results

EXIT_WORSE, EXIT_USAGE = 1, 2


class Change(NamedTuple):
    base: Measured
    new: Measured | None  # None: the new run has no such figure

    @property
    def ratio(self) -> float:
        """Above 1: better. 0 where the figure is missing."""
        if self.new is None:
            return 0.0
        if self.base.higher_is_better:
            return self.new.value / self.base.value
        return self.base.value / self.new.value

    def is_worse(self, tolerance: float) -> bool:
        return self.ratio < 1.0 - tolerance


def changes(base: Results, new: Results) -> list[Change]:
    """One for each figure of `base`. Raises ResultsError where they have nothing to be compared."""
    if base.benchmark != new.benchmark:
        raise ResultsError(f"{base.benchmark!r} and {new.benchmark!r} are two benchmarks")
    found = {figure.name: figure for figure in new.figures}
    for figure in base.figures:
        other = found.get(figure.name)
        if other and (other.unit, other.higher_is_better) != (figure.unit, figure.higher_is_better):
            raise ResultsError(f"{figure.name!r} is in {figure.unit} and in {other.unit}")
    return [Change(figure, found.get(figure.name)) for figure in base.figures]


def differences(base: Results, new: Results) -> list[str]:
    """What else differs, so that the ratios may say little."""
    lines = []
    if base.machine != new.machine:
        lines.append(
            f"the machines differ: {base.machine.cpu}, {base.machine.cores} cores"
            f" | {new.machine.cpu}, {new.machine.cores} cores"
        )
    for name in sorted(base.settings.keys() | new.settings.keys()):
        before, after = base.settings.get(name), new.settings.get(name)
        if before != after:
            lines.append(f"the setting {name} differs: {before} | {after}")
    return lines


def table(found: list[Change], tolerance: float) -> str:
    width = max(len(change.base.name) for change in found)
    lines = [f"{'figure':<{width}}{'base':>12}{'new':>12}  {'unit':<8}{'ratio':>7}"]
    for change in found:
        new = "missing" if change.new is None else f"{change.new.value:.4g}"
        worse = "  worse" if change.is_worse(tolerance) else ""
        lines.append(
            f"{change.base.name:<{width}}{change.base.value:>12.4g}{new:>12}  {change.base.unit:<8}"
            f"{change.ratio:>7.3f}{worse}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", type=Path, metavar="BASE.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--tolerance", type=float, default=0.05, metavar="PART", help="default: 0.05, 5%%")
    args = parser.parse_args(arguments)
    try:
        base, new = read_results(args.base), read_results(args.new)
        found = changes(base, new)
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    for line in differences(base, new):
        print(f"caution: {line}")
    print(table(found, args.tolerance))
    return EXIT_WORSE if any(change.is_worse(args.tolerance) for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
