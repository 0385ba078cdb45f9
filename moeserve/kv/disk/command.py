"""`moeserve cache list|verify|prune FOLDER`: inspects and cleans the folder of --kv-disk.

`list` and `verify` only read and are safe while a server uses the folder. `prune` deletes and needs the folder
unused.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.disk.directory import LOCK, DiskDirectory
from moeserve.kv.disk.fingerprint import Fingerprint
from moeserve.kv.disk.segment import (
    IrregularFileError,
    Segment,
    SegmentError,
    read_header,
    segment_numbers,
    segment_path,
    size_of,
)

EXIT_DAMAGED = 1
EXIT_USAGE = 2  # argparse's exit code for wrong usage


@dataclass(frozen=True, slots=True)
class _Found:
    """One segment found in the folder. `fingerprint` and `segment` are None if its header is damaged or of another
    version."""

    path: Path
    fingerprint: Fingerprint | None
    segment: Segment | None
    num_bytes: int
    last_used: float  # seconds since the epoch

    @property
    def server(self) -> Fingerprint | None:
        """The fingerprint without the fields in which pages of KV and of recurrent states differ, so that both group
        together."""
        return None if self.fingerprint is None else replace(self.fingerprint, page_tokens=0, page_bytes=0)

    @property
    def page_tokens(self) -> int:
        """Tokens per page; 0 for pages of recurrent state."""
        return 0 if self.fingerprint is None else self.fingerprint.page_tokens

    @property
    def keys(self) -> list[bytes]:
        return [] if self.segment is None else list(self.segment.checksums)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 1 if `verify` finds damage, 2 if the folder is in use or not one of
    --kv-disk."""
    options = command_parser().parse_args(arguments)
    run_command: Callable[[argparse.Namespace], int] = options.run
    if not os.path.exists(options.folder / LOCK):
        print(
            f"moeserve cache: {options.folder}: no folder that a server has used as --kv-disk",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        return run_command(options)
    except (ConfigError, OSError) as error:
        print(f"moeserve cache: {error}", file=sys.stderr)
        return EXIT_USAGE


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve cache", description="Look at the folder of --kv-disk, check it, or make room."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("list", _list, "show the models, and how many tokens of each are stored"),
        ("verify", _verify, "read every page and compare checksums"),
        ("prune", _prune, "delete what was not used for longest; no server may use the folder"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("folder", type=Path, metavar="FOLDER", help="the folder given to --kv-disk")
        command.set_defaults(run=run)
        if name == "prune":
            command.add_argument(
                "gib", type=_gib, metavar="GIB", help="GiB that may stay; 0: delete everything"
            )
    return parser


def _gib(text: str) -> float:
    """Parses GiB (an argparse type). Rejects NaN, for which every size comparison is false, so `prune` would delete
    all."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {text!r}")
    return value


def _segments(folder: Path) -> list[_Found]:
    found = []
    for number in segment_numbers(folder):
        path = segment_path(folder, number)
        fingerprint = segment = None
        try:
            fingerprint = read_header(path)
            segment = Segment(path, fingerprint, create=False)
        except IrregularFileError as error:
            print(f"{error}; it is left alone")
            continue
        except SegmentError as error:
            print(error)
        found.append(_Found(path, fingerprint, segment, size_of(path), path.lstat().st_mtime))
    return found


def _list(options: argparse.Namespace) -> int:
    found = _segments(options.folder)
    print(f"{'model':<40} {'engine':<28} {'tokens':>10} {'states':>7} {'GiB':>8}  last used")
    for fingerprint in dict.fromkeys(each.server for each in found):
        mine = [each for each in found if each.server == fingerprint]
        size = sum(each.num_bytes for each in mine) / GIB
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(each.last_used for each in mine)))
        if fingerprint is None:
            print(f"{'(damaged, or of another version)':<69} {'':>10} {'':>7} {size:>8.3f}  {used}")
            continue
        tokens = {key: each.page_tokens for each in mine for key in each.keys}
        states = sum(count == 0 for count in tokens.values())
        name = f"{fingerprint.model:<40} {fingerprint.engine:<28}"
        print(f"{name} {sum(tokens.values()):>10} {states:>7} {size:>8.3f}  {used}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = pages = 0
    for each in _segments(options.folder):
        if each.segment is None:
            damaged += 1
            continue
        bad = each.segment.num_damaged + sum(1 for _ in each.segment.damaged_pages())
        pages += len(each.segment.checksums)
        damaged += bad
        if bad:
            print(f"{each.path}: {bad} pages are damaged")
    print(f"{pages} pages, {damaged} damaged" + ("; a server computes them again" if damaged else ""))
    return EXIT_DAMAGED if damaged else 0


def _prune(options: argparse.Namespace) -> int:
    claim = DiskDirectory(options.folder)
    found = sorted(_segments(claim.path), key=lambda each: (each.segment is not None, each.last_used))
    total = sum(each.num_bytes for each in found)
    deleted = 0
    for each in found:
        if total - deleted <= options.gib * GIB:
            break
        for path in (each.path.with_suffix(".idx"), each.path):
            path.unlink(missing_ok=True)
        deleted += each.num_bytes
    print(f"deleted {deleted / GIB:.3f} GiB, {(total - deleted) / GIB:.3f} GiB stay")
    return 0
