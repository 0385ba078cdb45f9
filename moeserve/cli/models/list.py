"""`moeserve list`: the models that were downloaded."""

from __future__ import annotations

import argparse
import json
import sys
import time

from moeserve.errors import UserError


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve list",
        description="List the models in the Hugging Face Hub's cache (HF_HUB_CACHE), including those that other "
        "programs downloaded: the name for --model, the size, the time of the download, and the memory "
        "that the model needs on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: list[str]) -> int:
    """Returns exit code 0; 1 where the cache cannot be read."""
    args = command_parser().parse_args(arguments)
    from moeserve.cli.models.need import gpu_bytes, need_of, size_text, table
    from moeserve.hub.cache import cache_space, cached_models

    try:
        models = cached_models()
    except UserError as error:
        print(f"moeserve list: {error}", file=sys.stderr)
        return 1
    gpu = gpu_bytes()
    needs = [need_of(one.path, gpu) if one.is_whole else "parts are missing: pull it again" for one in models]
    if args.json:
        rows = [
            {
                "name": str(one.name),
                "path": str(one.path),
                "bytes": one.num_bytes,
                "modified": int(one.modified),
                "needs": need,
            }
            for one, need in zip(models, needs, strict=True)
        ]
        print(json.dumps(rows, indent=2))
    elif not models:
        print(f"no models in {cache_space().folder}: moeserve pull NAME downloads one")
    else:
        lines = [
            (
                str(one.name),
                size_text(one.num_bytes),
                time.strftime("%Y-%m-%d", time.localtime(one.modified)),
                need,
            )
            for one, need in zip(models, needs, strict=True)
        ]
        print(table([("NAME", "SIZE", "MODIFIED", "NEEDS HERE"), *lines]))
    return 0
