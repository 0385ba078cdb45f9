"""`moeserve bench trace`: writes a routing trace with given reuse distances for `bench engine --routing-trace`.

The routers of random weights choose experts without locality; a trace has the locality of real text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moeserve.cli.workload.options import whole
from moeserve.errors import UserError
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.placement.expert_cache.generate import PRESETS, generate
from moeserve.placement.expert_cache.routing_trace import write_trace


def main(arguments: list[str]) -> int:
    """Returns exit code 0, or 2 with a message for bad arguments or a bad file."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        shape = read_shape(open_dummy_model(args.model))
        topics = "" if args.topic_tokens is None else f", a topic every {args.topic_tokens} tokens"
        trace = generate(
            PRESETS[args.preset],
            f"preset {args.preset}{topics}, seed {args.seed}",
            tokens=args.tokens,
            layers=shape.num_layers,
            experts=shape.num_experts,
            top_k=shape.top_k,
            topic_tokens=args.topic_tokens,
            seed=args.seed,
        )
        write_trace(args.output, trace)
    except (UserError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.output}: {args.tokens} tokens, {trace.source}")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve bench trace",
        usage="%(prog)s --model MODEL --output FILE [options]",
        description="Write a routing trace with given reuse distances: which experts each token of a made-up text is "
        "routed to.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="model file whose layers and experts the trace is for; a header is enough",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="file to write the trace to"
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default="local",
        help=(
            "how soon a text uses the same experts again. local: the reuse distances published for Qwen3-30B-A3B; "
            "uniform: all experts equally likely (default: local)"
        ),
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, 1 << 20),
        default=4096,
        metavar="N",
        help=("length of the made-up text in tokens (default: 4096)"),
    )
    parser.add_argument(
        "--topic-tokens",
        type=whole(1, 1 << 20),
        metavar="N",
        help="change the topic after every N tokens (default: never)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, 1 << 32),
        default=0,
        metavar="N",
        help="seed of the random choices (default: 0)",
    )
    return parser
