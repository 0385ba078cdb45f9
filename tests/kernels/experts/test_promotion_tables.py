"""What the kernels that fill slots are told: every filling of a batch once, in groups in the batch's order."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.kernels import _C

LAYERS, EXPERTS, GROUPS, MOST, KINDS = 5, 16, 4, 10, 2
OF_GROUP = 3  # the tenth of ten in four groups has a third place
ROWS = (2 * OF_GROUP, 3 * OF_GROUP)


class World:
    def __init__(self, nodes: int, biases: int) -> None:
        rng = np.random.default_rng(0)
        self.nodes, self.of_one = nodes, 3 * nodes + biases
        self.copies = 3 * (1 + self.of_one * OF_GROUP)
        self.bias_source, self.bias_target, self.bias_each = rng.integers(1, 1 << 40, (3, LAYERS, biases))
        self.source, self.each, self.offset = rng.integers(1, 1 << 40, (3, LAYERS, 3 * nodes))
        self.kind = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1]])
        self.target, self.target_each = rng.integers(1, 1 << 40, (2, LAYERS, 9))
        starts = np.cumsum([self.copies, *(4 * rows for rows in ROWS)]).tolist()
        self.host = np.full((GROUPS, starts[-1] + 2 * (1 + OF_GROUP)), 7, np.int64)
        self.starts = starts
        self.tables = _C.PromotionTables(
            self.host, starts, source=self.source, each=self.each, offset=self.offset, kind=self.kind,
            target=self.target, target_each=self.target_each, bias_source=self.bias_source,
            bias_target=self.bias_target, bias_each=self.bias_each, staging=1 << 20, staging_bytes=4096, most=MOST,
            experts=EXPERTS,
        )  # fmt: skip

    def check(self, batch: np.ndarray) -> None:
        at = 0
        for row in self.host:
            copies = row[: self.copies].reshape(-1, 3)
            entries = row[self.starts[-1] :].reshape(-1, 2)
            count = int(entries[0, 0])
            assert copies[0, 0] == self.of_one * count
            addresses = [
                row[a : a + 4 * rows].reshape(-1, 4) for a, rows in zip(self.starts, ROWS, strict=False)
            ]
            seen = [0] * KINDS
            for i, (layer, expert, place, slot) in enumerate(batch[at : at + count]):
                assert entries[1 + i].tolist() == [layer * EXPERTS + expert, slot]
                staging = (1 << 20) + 4096 * (at + i)
                for piece in range(3 * self.nodes):
                    source = self.source[layer, piece] + place * self.each[layer, piece]
                    target = staging + self.offset[layer, piece]
                    found = copies[1 + self.of_one * i + piece].tolist()
                    assert found == [source, target, self.each[layer, piece]]
                for b, each in enumerate(self.bias_each[layer]):
                    source = self.bias_source[layer, b] + expert * each
                    target = self.bias_target[layer, b] + slot * each
                    assert copies[1 + self.of_one * i + 3 * self.nodes + b].tolist() == [source, target, each]
                for m in range(3):
                    staged = staging + self.offset[layer, self.nodes * m]
                    kind = self.kind[layer, m]
                    planes = slice(3 * m, 3 * m + 3)
                    targets = self.target[layer, planes] + slot * self.target_each[layer, planes]
                    assert addresses[kind][seen[kind]].tolist() == [staged, *targets]
                    seen[kind] += 1
            for of_kind, used in zip(addresses, seen, strict=True):
                assert not of_kind[used:].any()  # what a batch before has left would be unpacked again
            at += count
        assert at == len(batch)


def batch_of(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = (np.sort(rng.integers(0, LAYERS, count)), *(rng.integers(0, 16, count) for _ in range(3)))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(("nodes", "biases"), [(1, 0), (2, 3)])
def test_every_filling_is_told_once(nodes: int, biases: int) -> None:
    world = World(nodes, biases)
    for count in (MOST, 1, 3, 7, 0, 4):
        batch = batch_of(count, seed=count)
        world.tables.write(batch)
        world.check(batch)


def test_numbers_are_checked() -> None:
    world = World(1, 0)
    for column, value in ((0, LAYERS), (0, -1), (1, EXPERTS), (2, -1), (3, -1)):
        batch = batch_of(2)
        batch[1, column] = value
        with pytest.raises(ValueError, match="no such filling"):
            world.tables.write(batch)
    with pytest.raises(ValueError, match="larger than its tables"):
        world.tables.write(batch_of(MOST + 1))


def test_maps_change_as_moves_say() -> None:
    slots = np.array([[0, 1, -1, -1], [-1, -1, 0, -1]], np.int32)
    places = np.array([[3, 2, 1, 0], [0, 1, 2, -1]], np.int32)
    in_ram = np.where(slots >= 0, -1, places).astype(np.int32)
    maps = _C.HostMaps(slots, in_ram, places)
    batch = maps.start(np.array([[0, 2, 1], [1, 0, 2]]))
    assert batch.tolist() == [[0, 2, 1, 1], [1, 0, 0, 0]]
    assert slots.tolist() == [[0, -1, -1, -1], [-1, -1, -1, -1]]
    assert in_ram.tolist() == [[-1, 2, 1, 0], [0, 1, 2, -1]]
    maps.land(batch)
    assert slots.tolist() == [[0, -1, 1, -1], [0, -1, -1, -1]]
    assert in_ram.tolist() == [[-1, 2, -1, 0], [-1, 1, 2, -1]]
    for move in ([0, 3, 1], [1, 3, 0], [2, 0, 0], [0, 4, 0], [0, 1, -1]):  # no slot, no place, out of range
        with pytest.raises(ValueError, match="no such move"):
            maps.start(np.array([move]))
