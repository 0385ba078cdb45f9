"""Two checkouts' CPU products in turn, by format and number of tokens: what a change to the panels' kernels costs.

    python -m benchmarks.cpu_products --base ../before --new . [--isa avx2,avx512_vnni] [--types Q4_K,MXFP4]
        [--tokens 1,2,4,8,64] [--rounds 15]

Each checkout is a process of its own with one thread, and computes the same product of a matrix that fits in the second
level cache: the kernels alone, not the memory. The clock is the process's CPU time, so that other jobs of the machine
count only where they take cache or clock frequency. The two take turns, base new new base.

Printed for each ISA and type: the median of base's time over new's at each number of tokens (more than 1: new is
faster), and in brackets new's time per call in microseconds. Both checkouts need their C++ module built.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tests.support.servers.server import imports_from

TYPES = (
    "Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4,"
    "IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,IQ1_S,IQ1_M"
)

# What each process runs: it answers each line "ISA TYPE TOKENS" with the CPU seconds of a call.
_ENGINE = """
import functools, sys, time
import numpy as np, torch
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup
from moeserve.kernels.stream_operands import Activations
from moeserve.models.sources.gguf.dummy import _set_scales
from moeserve.quantization import QUANT_TYPES
torch.set_num_threads(1)
ROWS, COLS, SECONDS = 256, 2048, 0.02
types = {kind.name: kind for kind in QUANT_TYPES.values()}
rng = np.random.default_rng(0)
stream_of = functools.cache(lambda isa: CpuStream(1, isa))

@functools.cache
def matrix_of(isa, name):
    # Random codes with scales of a plausible size, as products of zeros or with NaN could take another time.
    kind = types[name]
    blocks = rng.integers(0, 256, (ROWS * COLS // kind.block_columns, kind.block_bytes), dtype=np.uint8)
    _set_scales(blocks, kind, 0.1)
    return stream_of(isa).pack(np.ascontiguousarray(blocks.reshape(ROWS, -1)), int(kind), (ROWS, COLS))

def clock(isa, group, x, out, calls):
    start = time.process_time()
    for _ in range(calls):
        stream_of(isa).linear(x, len(out), group, [out])
    stream_of(isa).wait()
    return (time.process_time() - start) / calls

print("ready", flush=True)
for line in sys.stdin:
    isa, name, tokens = line.split()
    group = LinearGroup([matrix_of(isa, name)])
    x, out = Activations(int(tokens), COLS), torch.empty(int(tokens), ROWS)
    stream_of(isa).norm(torch.randn(int(tokens), COLS), torch.ones(COLS), 1e-6, int(tokens), x)
    calls = max(1, round(SECONDS / max(clock(isa, group, x, out, 3), 1e-6)))
    print(clock(isa, group, x, out, calls), flush=True)
"""


class Engine:
    """One checkout's kernels. RuntimeError where the process ends."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE],
            cwd=checkout,
            env=os.environ | imports_from(checkout),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._line()

    def seconds(self, isa: str, kind: str, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{isa} {kind} {tokens}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended; its reason is above")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(base: Engine, new: Engine, work: tuple[str, str, int], rounds: int) -> tuple[float, float]:
    """The median ratio, and new's median seconds."""
    pairs = []
    for turn in range(rounds):
        if turn % 2 == 0:
            before, after = base.seconds(*work), new.seconds(*work)
        else:
            after, before = new.seconds(*work), base.seconds(*work)
        pairs.append((before, after))
    ratio = statistics.median(before / after for before, after in pairs)
    return ratio, statistics.median(after for _, after in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--isa", default="avx2,avx512_vnni")
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--tokens", default="1,2,4,8,64")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    tokens = [int(n) for n in args.tokens.split(",")]
    base, new = Engine(args.base), Engine(args.new)
    for isa in args.isa.split(","):
        print(f"{isa:<12}" + "".join(f"{n:>18}" for n in tokens))
        for kind in args.types.split(","):
            print(f"  {kind:<10}", end="", flush=True)
            for n in tokens:
                ratio, seconds = compare(base, new, (isa, kind, n), args.rounds)
                print(f"{ratio:>8.2f} ({seconds * 1e6:7.1f})", end="", flush=True)
            print()
    base.close()
    new.close()


if __name__ == "__main__":
    main()
