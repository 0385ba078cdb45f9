"""Runs steps with experts on a disk with faults (faulty_reads.c, preloaded), and asserts that no token is wrong. Then
runs steps on a slow disk without faults, with and without guesses. Prints what happened as JSON. Arguments: a GGUF
file, GiB of RAM for experts, and the number of faults."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from moeserve.kernels.stream_operands import DiskLayer
from moeserve.messages.steps import StepResult
from moeserve.models.blocks.cpu import disk_experts
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import GREEDY, Driver, small_config

STREAMS = 4
LENGTH = 9
TOKENS = 8  # on a slow disk
SLOW = (
    2_000_000  # bytes per second: an expert takes 55 ms, a layer's computation less than a hundredth of that
)


def run(model: Path, expert_ram: float, least: int) -> dict[str, int]:
    plain = Driver(load_cpu_runner(small_config(model, threads=2), lambda *_: None))
    disk = Driver(load_cpu_runner(small_config(model, threads=2, expert_ram=expert_ram), lambda *_: None))
    disk_of_test = ctypes.CDLL(None)
    steps = failed = right = 0

    def injected() -> list[int]:
        return [getattr(disk_of_test, f"faulty_reads_{kind}")() for kind in ("failed", "cut", "delayed")]

    disk_of_test.faulty_reads_switch(1)
    first = 0
    while sum(injected()) < least or not failed or not right:
        prompts = [[(first + 17 * slot + 3 * i) % 1000 for i in range(LENGTH)] for slot in range(STREAMS)]
        first += 1
        alive = set(range(STREAMS))
        counts = [LENGTH, 1, 1]
        for count in counts:
            results: list[StepResult] = []
            for driver in (plain, disk):
                new = [driver.new(slot, prompts[slot], GREEDY) for slot in range(STREAMS) if count == LENGTH]
                rows = [driver.row(slot, count, sample=True) for slot in range(STREAMS)]
                results.append(driver.step(new, rows))
            expected, found = results
            steps += 1
            failed += len(found.failed_rows)
            alive -= found.failed_rows.keys()
            for slot in alive:
                assert found.sampled[slot].token_id == expected.sampled[slot].token_id, (first, slot)
                right += 1
    eio, cut, delayed = injected()
    disk_of_test.faulty_reads_switch(0)
    return {"steps": steps, "failed": failed, "right": right, "eio": eio, "cut": cut, "delayed": delayed}


def bytes_read(model: Path, expert_ram: float, *, guessed: bool, rate: int) -> int:
    """By one stream's tokens, on a disk of `rate` bytes per second (0: as it is)."""
    most, disk_experts.MOST_GUESSED_TOKENS = disk_experts.MOST_GUESSED_TOKENS, 8 if guessed else 0
    layer_of = disk_experts.CpuDiskExperts.layer

    def slow_layer(*args: Any) -> DiskLayer | None:
        time.sleep(3e-3)
        return layer_of(*args)

    if not rate:  # a large model's layer takes as long
        disk_experts.CpuDiskExperts.layer = slow_layer  # type: ignore[assignment, method-assign]
    driver = Driver(load_cpu_runner(small_config(model, threads=2, expert_ram=expert_ram), lambda *_: None))
    driver.step([driver.new(0, [1, 2, 3], GREEDY)], [driver.row(0, 3, sample=True)])
    for _ in range(TOKENS):  # the pauses between layers become known
        driver.step([], [driver.row(0, 1, sample=True)])
    ctypes.CDLL(None).faulty_reads_throttle(rate)
    read = 0
    for _ in range(TOKENS if rate else 3 * TOKENS):
        disk = driver.step([], [driver.row(0, 1, sample=True)]).expert_disk
        assert disk is not None
        read += disk.bytes
    ctypes.CDLL(None).faulty_reads_throttle(0)
    disk_experts.MOST_GUESSED_TOKENS = most
    disk_experts.CpuDiskExperts.layer = layer_of  # type: ignore[method-assign]
    return read


if __name__ == "__main__":
    model, expert_ram = Path(sys.argv[1]), float(sys.argv[2])
    happened = run(model, expert_ram, int(sys.argv[3]))
    for name, rate in (("slow", SLOW), ("fast", 0)):
        for guessed in (True, False):
            key = f"{name}_{'guessed' if guessed else 'plain'}"
            happened[key] = bytes_read(model, expert_ram, guessed=guessed, rate=rate)
    print(json.dumps(happened))
