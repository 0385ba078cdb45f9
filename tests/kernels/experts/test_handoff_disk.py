"""The hand-off with experts on disk: turns of hits and misses, waves, failures, and slots that are held for copies. The
test is in the place of the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.experts.handoff_world import HERE, MAX_TOKENS  # isort: skip  (first: it sets up the interpreter)
import torch

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream
from tests.kernels.experts.handoff_disk_world import World


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_any_number_of_slots_has_the_bits_of_ram(tmp_path: Path, threads: int, slots: int) -> None:
    world = World(CpuStream(threads), tmp_path / "file", slots)
    for step, n in enumerate([MAX_TOKENS, 1, 1, 1, 2, 1, 5, 1, 1, MAX_TOKENS] * 2):
        for index in (0, 2) if step % 5 == 0 else (2 * (step % 2),):
            _, found, expected = world.step(n, seed=step, index=index)
            assert torch.equal(found, expected), (step, n)
    counts = world.disk.counts()
    assert counts.misses > counts.errors == 0
    assert counts.hits > 0
    assert world.handoff.expert_reads(np.array([True, False, True])) == counts.hits + counts.misses
    world.handoff.close()


def test_a_file_that_ends_fails_the_tokens_that_needed_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    world = World(CpuStream(2), file, 2)
    whole, changed_ns = file.read_bytes(), file.stat().st_mtime_ns
    os.truncate(file, 0)
    ids, found, _ = world.step(4, seed=1)
    assert torch.isfinite(found).all()
    failed = dict(world.disk.take_failures())
    of_layer_0 = set(np.flatnonzero((ids >= 0).any(dim=1).numpy()).tolist())
    assert of_layer_0 <= failed.keys()
    assert all("could not be read from disk: the file ends at byte" in why for why in failed.values())
    file.write_bytes(whole)
    os.utime(file, ns=(changed_ns, changed_ns))
    _, found, expected = world.step(4, seed=1)
    assert torch.equal(found, expected)
    assert not world.disk.take_failures()
    world.handoff.close()


@pytest.mark.slow  # seconds, most of them to load torch
def test_a_thousand_faults_bring_no_wrong_row(tmp_path: Path) -> None:
    library = tmp_path / "faulty_reads.so"
    source = Path(__file__).parents[2] / "support" / "faults" / "faulty_reads.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.faults.on_faulty_handoff", str(tmp_path / "file.gguf"), "1000"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found.values()) > 0, found


def test_held_slots_stay_while_others_come(tmp_path: Path) -> None:
    """Half of the slots at most; what is held can be copied from, whatever the steps read."""
    world = World(CpuStream(2), tmp_path / "file", 3)
    world.step(1, seed=0)
    marks = np.zeros(len(HERE), np.bool_)
    world.disk.mark_holdable(0, marks)
    assert marks.sum() == 1
    held = int(np.flatnonzero(marks)[0])
    slot = world.disk.hold(0, held)
    assert slot >= 0
    world.disk.mark_holdable(0, marks)
    assert not marks.any()
    for step in range(12):
        _, found, expected = world.step(MAX_TOKENS if step % 3 == 0 else 1, seed=step)
        assert torch.equal(found, expected)
        assert world.disk.hold(0, held) == slot
        assert all(world.disk.hold(0, other) == -1 for other in range(len(HERE)) if other != held)
    world.disk.release(0, held)
    world.disk.mark_holdable(0, marks)
    assert marks.sum() == 1
    world.handoff.close()


def test_a_disk_of_other_layers_is_refused(tmp_path: Path) -> None:
    world = World(CpuStream(1), tmp_path / "file", 2)
    with pytest.raises(ValueError, match="wanted"):
        _C.DiskExperts(world.stream.native, [str(tmp_path / "file")], [(4, [], [], [])], 1, 1, 0.9, 1.0)
    world.handoff.close()
