"""The hand-off with experts on disk: turns of hits and misses, waves, failures, and slots that are held for copies. The
test is in the place of the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.handoff_world import (  # isort: skip  (first: it sets up the interpreter)
    HERE,
    HIDDEN,
    MAX_TOKENS,
    TOP_K,
    HandGpu,
    Layer,
    alone,
    local_routes,
)
import torch

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import DiskExpertLayer, DiskPart, Reading, open_disk_experts
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from tests.kernels.weights import activations

NUMBERS = [HERE.index(expert) for expert in sorted(HERE)]  # the file has the experts in another order


class World:
    """Two layers with experts on disk and one in RAM between them, in a hand-off."""

    def __init__(self, stream: CpuStream, file: Path, slots: int, patience_s: float = 30.0) -> None:
        self.stream = stream
        self.layers = [Layer.random(stream, seed=seed) for seed in (0, 10, 20)]
        parts: list[tuple[DiskPart, ...] | None] = []
        with file.open("wb") as out:
            for index, layer in enumerate(self.layers):
                parts.append(None if index == 1 else tuple(self._part(out, w, slots) for w in layer.weights))
        on_disk = [p and DiskExpertLayer(len(HERE), (p[0], p[1], p[2]), numbers=NUMBERS) for p in parts]
        self.disk = open_disk_experts(stream, on_disk, Reading(2, 1 << 12, 0.9, patience_s))
        experts = [
            layer.experts
            if p is None
            else CpuExperts(*(part.slots for part in p), layer.experts.expert_map, num_on_disk=len(HERE))
            for layer, p in zip(self.layers, parts, strict=True)
        ]
        self.handoff = ExpertHandoff(stream, experts, MAX_TOKENS, HIDDEN, TOP_K, "cpu", disk=self.disk)
        self.gpu, self._steps = HandGpu(self.handoff), 0

    def _part(self, out, weights, slots: int) -> DiskPart:  # type: ignore[no-untyped-def]
        count, rows, _ = weights.rows.shape
        offset, stride = out.tell(), weights.rows[0].nbytes
        for place in np.argsort(NUMBERS):
            out.write(np.ascontiguousarray(weights.rows[place]).tobytes())
        matrix = self.stream.slots(int(weights.type), (slots, rows, weights.cols))
        assert count == len(HERE)
        return DiskPart(matrix, Path(out.name), offset, stride)

    def step(self, n: int, seed: int, index: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step of n tokens through all layers. Returns the routes of layer `index`, its result, and what it should
        be."""
        self.handoff.begin()
        self._steps += 1
        found = []
        for i, layer in enumerate(self.layers):
            x, (ids, weights) = activations("gaussian", n, HIDDEN, seed=i), local_routes(n, seed=i + seed)
            ids[0, 0] = seed % len(HERE) if (ids < 0).all() else ids[0, 0]  # else nothing is asked for
            self.gpu.publish(i, self._steps, x, ids, weights)
            self.gpu.wait(i)
            found.append((ids, self.gpu.result(i, n).clone(), (layer, x, ids, weights)))
        self.stream.wait()
        self.handoff.check()
        ids, result, case = found[index]
        return ids, result, alone(self.stream, *case)


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
    whole = file.read_bytes()
    os.truncate(file, 0)
    ids, found, _ = world.step(4, seed=1)
    assert torch.isfinite(found).all()
    failed = dict(world.disk.take_failures())
    of_layer_0 = set(np.flatnonzero((ids >= 0).any(dim=1).numpy()).tolist())
    assert of_layer_0 <= failed.keys()
    assert all("could not be read from disk: the file ends at byte" in why for why in failed.values())
    file.write_bytes(whole)
    _, found, expected = world.step(4, seed=1)
    assert torch.equal(found, expected)
    assert not world.disk.take_failures()
    world.handoff.close()


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
