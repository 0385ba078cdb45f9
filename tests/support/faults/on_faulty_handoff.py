"""Runs the hand-off with experts on a disk with faults (faulty_reads.c, preloaded), and asserts that no row is wrong.
Prints what happened as JSON. Arguments: a path for the experts that ends in .gguf, and the number of faults."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from tests.kernels.experts.handoff_disk_world import World  # isort: skip  (first: it sets up the interpreter)
import torch

from moeserve.kernels.cpu_stream import CpuStream


def run(path: Path, least: int) -> dict[str, int]:
    world, faulty = World(CpuStream(2), path, 2), ctypes.CDLL(None)
    steps = failed = right = 0

    def injected() -> list[int]:
        return [getattr(faulty, f"faulty_reads_{kind}")() for kind in ("failed", "cut", "delayed")]

    faulty.faulty_reads_switch(1)
    while sum(injected()) < least or not failed or not right:
        steps += 1
        _, found, expected = world.step(1 + steps % 6, seed=steps, index=2 * (steps % 2))
        lost = world.disk.take_failures()
        for row in set(range(len(found))) - {row for row, _ in lost}:
            assert torch.equal(found[row], expected[row]), (steps, row)
            right += 1
        failed += len(lost)
    faulty.faulty_reads_switch(0)
    eio, cut, delayed = injected()
    world.handoff.close()
    return {"steps": steps, "failed": failed, "right": right, "eio": eio, "cut": cut, "delayed": delayed}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
