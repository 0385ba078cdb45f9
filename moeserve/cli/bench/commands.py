"""`moeserve bench <what>`: the table of benchmarks. Each is a function from arguments to exit code, imported when
run."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "engine": "prefill and decode of the engine alone, without the server",
    "serve": "put load on a running server, ours or another's, and measure what its users see",
    "trace": "write a routing trace, for `engine --routing-trace`",
    "steps": "measure how long a step takes by what is in it, for `moeserve simulate`",
}


def main(arguments: list[str]) -> int:
    """Runs the named benchmark. Returns its exit code; 2 if none is named."""
    if arguments and arguments[0] in COMMANDS:
        module = importlib.import_module(f"moeserve.cli.bench.{arguments[0]}")
        return int(module.main(arguments[1:]))
    asked = arguments[:1] in (["--help"], ["-h"])
    print(usage(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def usage() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: moeserve bench {" + ",".join(COMMANDS) + "} [options]   (--help explains)", "", *lines]
    )
