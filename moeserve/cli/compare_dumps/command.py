"""`moeserve compare-dumps A B`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moeserve.cli.compare_dumps.compare import Tolerances, compare
from moeserve.cli.compare_dumps.reader import Dump
from moeserve.cli.compare_dumps.report import report
from moeserve.errors import UserError

DEFAULT = Tolerances(plain=0.1, tie=3.0)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if the dumps agree within the tolerance, 1 if they differ, 2 if they cannot be read or
    compared (a message says why)."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    tolerances = Tolerances(args.tolerance, args.tie_allowance)
    try:
        result = compare(Dump(args.a), Dump(args.b), tolerances)
    except UserError as error:
        parser.error(str(error))
    for line in report(result, tolerances):
        print(line)
    return 0 if result.first is None else 1


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve compare-dumps",
        description="Compare two dumps of `moeserve --debug-dump` and name the first layer and tensor that differ.",
        epilog="Exit code: 0 the same within the tolerance, 1 different, 2 unreadable or nothing to compare.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder of the first dump")
    parser.add_argument("b", type=Path, metavar="B", help="folder of the second dump")
    parser.add_argument(
        "--tolerance",
        type=_distance,
        default=DEFAULT.plain,
        metavar="REL",
        help=(
            "largest relative distance |a - b| / max(|a|, |b|) at which two rows count as equal; 0: the same bits "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--tie-allowance",
        type=_distance,
        default=DEFAULT.tie,
        metavar="X",
        help=(
            "after a near tie of the router, rows may differ because the dumps used different experts: add X times "
            "the weight of these experts to the tolerance (default: %(default)s)"
        ),
    )
    return parser


def _distance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value
