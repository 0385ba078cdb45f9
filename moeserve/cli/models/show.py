"""`moeserve show NAME|FILE`: describes a model, and what it would need on this machine."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.errors import UserError
from moeserve.hub import HubName, name_of

if TYPE_CHECKING:
    from moeserve.models.interface import ModelShape
    from moeserve.models.sources.source import ModelSource

MAX_TYPES = 4  # the most quantisation types that are named


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve show",
        description="Show a model's architecture, size and types, and what it would need on this machine, from its "
        "header. For a model that is not downloaded: its files and their size. Downloads nothing.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model in any form that --model accepts: a name on the Hub, a file or a folder",
    )
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 1 if the model does not exist or cannot be read."""
    text = command_parser().parse_args(arguments).model
    path = Path(text).expanduser()
    try:
        name = None if path.exists() else name_of(text)
        print(_of_name(name) if name is not None else _of_path(path))
    except UserError as error:
        print(f"moeserve show: {error}", file=sys.stderr)
        return 1
    return 0


def _of_name(name: HubName) -> str:
    """Describes a model of the Hub, downloaded or not. Raises UserError if it cannot be found."""
    from moeserve.cli.models.need import size_text
    from moeserve.hub.cache import cache_space, find_cached
    from moeserve.hub.download import listed

    cached = find_cached(name)
    if cached is not None and cached.is_whole:
        return _of_path(cached.path)
    files, num_bytes = listed(name)
    free = cache_space().free_bytes
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    lines = [
        f"{name}: not downloaded",
        f"files     {count}, the first {files[0]}",
        f"size      {size_text(num_bytes)}; {size_text(free)} are free on the disk",
    ]
    remedy = f"moeserve pull {name}" if num_bytes <= free else "the disk is too small"
    return "\n".join([*lines, f"download  {remedy}"])


def _of_path(path: Path) -> str:
    """Describes a local model. Raises UserError if it cannot be read."""
    from moeserve.cli.command_line import resolve
    from moeserve.cli.models.need import gpu_bytes, need_of, size_text
    from moeserve.config import ServerConfig
    from moeserve.models.open import open_metadata
    from moeserve.models.registry import read_checked_shape

    found = Path(resolve(ServerConfig(model=str(path))).model)
    source = open_metadata(found)
    shape = read_checked_shape(source)
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    return "\n".join(
        [
            f"model     {found}",
            f"family    {shape.architecture}",
            f"size      {size_text(size)}, {_parameters(source)} parameters: {_types(source)}",
            f"layers    {_layers(shape)}",
            f"context   {shape.context_length:,} tokens",
            f"needs     {need_of(found, gpu_bytes())}",
        ]
    )


def _layers(shape: ModelShape) -> str:
    if not shape.moe_layers:
        return f"{shape.num_layers}, without experts"
    dense = shape.num_layers - len(shape.moe_layers)
    without = f"; {dense} without experts" if dense else ""
    return f"{shape.num_layers}, {shape.num_experts} experts, {shape.top_k} a token{without}"


def _parameters(source: ModelSource) -> str:
    total = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
    return f"{total / 1e9:.1f} billion" if total >= 1e8 else f"{total / 1e6:.1f} million"


def _types(source: ModelSource) -> str:
    """Returns the quantisation types that take the most bytes."""
    shares: Counter[str] = Counter()
    for tensor in source.tensors.values():
        shares[tensor.type.name] += tensor.nbytes
    whole = shares.total() or 1
    return ", ".join(f"{name} {100 * part / whole:.0f}%" for name, part in shares.most_common(MAX_TYPES))
