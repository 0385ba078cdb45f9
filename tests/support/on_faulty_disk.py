"""Runs steps with experts on a disk with faults (faulty_reads.c, preloaded), and asserts that no token is wrong. Prints
what happened as JSON. Arguments: a GGUF file, GiB of RAM for experts, and the least number of faults."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from moeserve.messages.steps import StepResult
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import GREEDY, Driver, small_config

STREAMS = 4
LENGTH = 9


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
    return {"steps": steps, "failed": failed, "right": right, "eio": eio, "cut": cut, "delayed": delayed}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
