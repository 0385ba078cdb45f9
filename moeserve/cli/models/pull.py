"""`moeserve pull NAME`: downloads a model from the Hub, or its missing files."""

from __future__ import annotations

import argparse
import sys

from moeserve.errors import UserError
from moeserve.hub import HubError, name_of


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve pull",
        description="Download a model from the Hugging Face Hub into its cache (HF_HUB_CACHE). All commands then "
        "find it by the same name. An interrupted download continues where it stopped. Private and gated "
        "repositories need HF_TOKEN.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="org/repo, org/repo:Q4_K_M or org/repo:file.gguf; write @revision after the repository for a branch, "
        "tag or commit",
    )
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if the model is here now, 1 if it could not be downloaded or is no model, 2 if NAME
    is not a valid name."""
    parser = command_parser()
    text = parser.parse_args(arguments).name
    try:
        name = name_of(text)
    except HubError as error:
        parser.error(str(error))
    if name is None:
        parser.error(
            f"{text!r} is not a name on the Hub: use org/repo, org/repo:Q4_K_M or org/repo:file.gguf"
        )
    from moeserve.cli.models.need import gpu_bytes, need_of
    from moeserve.hub.download import fetch
    from moeserve.models.sources.first_bytes import what_instead_of_gguf
    from moeserve.processes.logs import set_up_logging

    set_up_logging("pull", "info")
    try:
        path = fetch(name)
        if path.is_file() and (problem := what_instead_of_gguf(path)):  # downloaded by another program
            raise UserError(f"{path} is not a GGUF file {problem}; moeserve rm {name} removes it")
    except UserError as error:
        print(f"moeserve pull: {error}", file=sys.stderr)
        return 1
    print(f"{name} is at {path}\nneeds {need_of(path, gpu_bytes())}\nserve it: moeserve --model {name}")
    return 0
