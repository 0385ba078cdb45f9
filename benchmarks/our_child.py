#!/usr/bin/env python3
"""Our engine as a child of compare_llama_cpp.py, with the commands of llama_cpp_child.py.

The FORM of `load` is the RAM for experts in GiB. Standard output holds nothing but answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compare_llama_cpp import Ours

TOKENS = 1024  # of a stream, at most


def main() -> None:
    ours: Ours | None = None
    for line in sys.stdin:
        name, *args = line.split()
        if name == "load":
            path, threads, expert_ram, clock, streams = args
            sizes = (0, clock, int(streams), TOKENS, "cpu", float(expert_ram))
            ours = Ours(path, int(threads), *sizes)
            answer = ours.load_s
        elif ours is None:
            raise SystemExit("load a model first")
        elif name == "prefill":
            answer = ours.prefill(int(args[0]))
        else:
            streams, ours.prompt, steps = map(int, args)
            answer = ours.decode(streams, steps)
        print(json.dumps(answer), flush=True)


main()  # it runs as a child and is imported by nothing
