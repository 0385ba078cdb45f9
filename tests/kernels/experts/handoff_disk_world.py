"""A hand-off with experts on disk, whose GPU is the test."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path

import numpy as np

from tests.kernels.experts.handoff_world import (  # isort: skip  (first: it sets up the interpreter)
    HERE,
    HIDDEN,
    MAX_TOKENS,
    TOP_K,
    HandGpu,
    Layer,
    alone,
    local_routes,
)
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import DiskExpertLayer, DiskPart, Reading, open_disk_experts
from moeserve.kernels.handoff import CpuExperts, ExpertHandoff
from tests.kernels.weights import Weights, activations

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

    def _part(self, out: BufferedWriter, weights: Weights, slots: int) -> DiskPart:
        count, rows, _ = weights.rows.shape
        offset, stride = out.tell(), weights.rows[0].nbytes
        for place in np.argsort(NUMBERS):
            out.write(np.ascontiguousarray(weights.rows[place]).tobytes())
        matrix = self.stream.slots(int(weights.type), (slots, rows, weights.cols))
        assert count == len(HERE)
        return DiskPart(matrix, Path(out.name), offset, stride)

    def step(self, n: int, seed: int, index: int = 0) -> tuple[Tensor, Tensor, Tensor]:
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
