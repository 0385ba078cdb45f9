"""`moeserve rm NAME`: removes a downloaded model."""

from __future__ import annotations

import argparse
import sys

from moeserve.errors import UserError
from moeserve.hub import parse_name


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve rm",
        description="Remove a downloaded model from the Hugging Face Hub's cache, after asking. Other models from "
        "the same repository stay. A server that has loaded the model keeps running.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="name of the model, as `moeserve list` shows it")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if the model, or the rest of its interrupted download, is deleted; 1 if it is not here
    or cannot be deleted, or if the user says no; 2 if NAME is not a valid name, or if --yes is missing and there is no
    terminal to ask on."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    name = parse_name(args.name)
    if name is None:
        parser.error(f"{args.name!r} is not a name on the Hub; to delete a file of your own, use rm")
    from moeserve.cli.models.need import size_text
    from moeserve.hub.cache import cache_space, find_cached, remove, remove_partial

    try:
        model = find_cached(name)
        if model is None and (partial := remove_partial(name)):
            print(f"removed {size_text(partial)} of an interrupted download of {name.repo}")
            return 0
        if model is None:
            print(f"moeserve rm: {name} is not in {cache_space().folder}; see moeserve list", file=sys.stderr)
            return 1
        if not args.yes and not sys.stdin.isatty():
            parser.error("there is no terminal to ask on: use --yes")
        if not args.yes:
            answer = input(f"Remove {model.name} ({size_text(model.num_bytes)})? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                return 1
        remove(model)
    except (UserError, OSError) as error:
        print(f"moeserve rm: {error}", file=sys.stderr)
        return 1
    print(f"removed {model.name}, {size_text(model.num_bytes)}")
    return 0
