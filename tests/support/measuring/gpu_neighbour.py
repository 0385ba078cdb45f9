"""An engine's part on a GPU beside other programs: a process whose step reads 8 GB in 400 kernels of a CUDA graph.

`Neighbour` starts `python -m tests.support.measuring.gpu_neighbour`, which answers each line, a number of seconds, with
the milliseconds of its steps.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[3]
KERNELS = 400
NUMBERS = 1024, 10240  # that a kernel reads, float16


class Neighbour:
    """Owns the process. A step takes 2 ms or more."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.measuring.gpu_neighbour"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._questions, self._answers = self._child.stdin, self._child.stdout
        assert self._answers.readline() == "ready\n"

    def begin(self, seconds: float) -> None:
        print(seconds, file=self._questions, flush=True)

    def step_ms(self) -> list[float]:
        """Milliseconds of each step since `begin`. Blocks until these seconds have passed."""
        return [float(word) for word in self._answers.readline().split()]

    def close(self) -> None:
        self._questions.close()
        self._child.wait()


def main() -> None:
    read = torch.ones(KERNELS, *NUMBERS, dtype=torch.float16, device="cuda")
    sums = torch.empty(KERNELS, NUMBERS[0], dtype=torch.float16, device="cuda")

    def launch() -> None:
        for part, total in zip(read, sums, strict=True):
            torch.sum(part, dim=1, out=total)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        times: list[float] = []
        end = time.monotonic() + float(line)
        while (began := time.monotonic()) < end:
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.monotonic() - began) * 1e3)
        print(*(f"{ms:.3f}" for ms in times), flush=True)


if __name__ == "__main__":
    main()
