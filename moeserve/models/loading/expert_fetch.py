"""Fetches a part of a step's missed experts from RAM within the step, into the slots where they stay.

    router                        each route's slot, -1: the expert is in RAM
    choose      a layer's missed experts with the highest scores take the slots of the experts with the lowest scores
    hand-off                      the CPU pool begins with the other missed experts
    copy        panels -> staging buffer -> planes, in the step's own stream
    experts                       of the GPU, the fetched ones among them
    collect                       the pool's result; whoever came first gets a larger share from now on

The step's stream owns the map, the slots and the staging buffer while such a step runs: nothing else fills slots then
(`ExpertCache`). So weights are read from RAM once, by the pool or over PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.handoff.fetch import (
    FIRST_SHARE,
    GEOMETRY,
    MATRICES,
    OF_PIECE,
    FetchLayer,
    choose_fetched,
)
from moeserve.kernels.planes.copies import copy_scattered
from moeserve.kernels.planes.panels_triton import unpack_scattered
from moeserve.models.loading.promotion_tables import PLANES, Kind, SlotLayer
from moeserve.quantization import QUANT_TYPES

ROUNDS = 4  # of an unpacking program, at most: few of a layer's tables are full
PROGRAMS = 32  # that copy: the GPU has nothing else to do meanwhile


class ExpertFetch:
    """Launches the choice and the copies, layer by layer. Owns the experts' scores on the device."""

    def __init__(
        self,
        layers: Sequence[SlotLayer | None],
        sources: Sequence[Sequence[Tensor] | None],
        slot_map: Tensor,
        places: npt.NDArray[np.int32],
        staging: Tensor,
        decay: float,
        rows: range,
    ) -> None:
        """layers: None for a layer whose experts do not move; all matrices are quantised. sources: by
        layer, the panels of gate, up and down. slot_map: int32 [layers, experts] on the device. places: int32 [layers,
        experts]: an expert's place in RAM; -1: it must not move. staging: uint8 [experts, bytes] on the device; as many
        are fetched at once. rows: of steps that fetch."""
        device, (count, experts) = staging.device, slot_map.shape
        self._staging = staging
        self._decay = decay
        self._rows = rows
        self._control = torch.zeros(2, dtype=torch.int32, device=device)
        self._scratch = torch.zeros(3, experts, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(count, 4, dtype=torch.int32, device=device)
        self._scores = torch.zeros(count, experts, device=device)
        movable = torch.from_numpy(places).to(device)
        self._layers: list[FetchLayer | None] = []
        self._addresses: list[list[tuple[Kind, Tensor]]] = []
        for index, (layer, panels) in enumerate(zip(layers, sources, strict=True)):
            self._layers.append(None)
            self._addresses.append([])
            if layer is None or panels is None:
                continue
            nodes = len(layer.pieces[0])
            copies, addresses = self._tables(device, MATRICES * nodes + len(layer.biases))
            first, geometry = 0, np.zeros((MATRICES, GEOMETRY + OF_PIECE * nodes), np.int64)
            for kind in sorted(set(layer.kinds)):
                step, table = layer.kinds.count(kind), addresses[first:]
                of_kind = [m for m in range(MATRICES) if layer.kinds[m] == kind]
                for rank, m in enumerate(of_kind):
                    geometry[m] = self._geometry(layer, panels[m], m, first + rank, step)
                self._addresses[index].append((kind, table[: step * len(self._staging)]))
                first += step * len(self._staging)
            flat = [*geometry.flatten().tolist(), *(n for bias in layer.bias_copies for n in bias)]
            numbers = torch.tensor([*flat, *[0] * (len(flat) % 2)], dtype=torch.int64)
            self._layers[index] = FetchLayer(
                slot_map[index], movable[index], self._scores[index], numbers.to(device), copies, addresses,
                self._fetched[index, :2], nodes, len(layer.biases),
            )  # fmt: skip

    def takes(self, rows: int) -> bool:
        """Returns whether steps of this number of rows, padding included, fetch experts."""
        return rows in self._rows

    def has(self, layer: int) -> bool:
        """Returns whether the layer's experts move."""
        return self._layers[layer] is not None

    @property
    def totals(self) -> Tensor:
        """int32 [layers, 4] on the device; column 0: experts fetched in the last step, 1: since start-up; two more
        align a row to 16 bytes."""
        return self._fetched

    @property
    def scores(self) -> Tensor:
        """float32 [layers, experts] on the device; written by `choose`."""
        return self._scores

    def choose(self, layer: int, ids: Tensor, local: Tensor) -> None:
        """Launches the choice, after the router and before the hand-off. ids, local: int32 [n, top_k]: the routes'
        experts, and their slots, which are updated."""
        choose_fetched(ids, local, self._of(layer), self._control, self._scratch, self._staging, self._decay)

    def copy(self, layer: int) -> None:
        """Launches the copies, after the hand-off and before the GPU's experts."""
        copy_scattered(self._of(layer).copies, PROGRAMS)
        for (kind, rows, cols), addresses in self._addresses[layer]:
            unpack_scattered(addresses, QUANT_TYPES[kind], rows, cols, gcd(len(self._staging), ROUNDS))

    def balance(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns what `ExpertHandoff.collect` needs to correct the share that is fetched."""
        return self._control, self._of(layer).fetched

    def start(self) -> None:
        """Lets the steps launched from now on fetch; `ExpertCache` calls it behind the first one."""
        self._control.copy_(torch.tensor([FIRST_SHARE, len(self._staging)], dtype=torch.int32))

    def set_scores(self, scores: Tensor) -> None:
        """Replaces the experts' scores. scores: float32 [layers, experts] on the host, not to be changed until the next
        step has ended."""
        self._scores.copy_(scores, non_blocking=True)

    def _of(self, layer: int) -> FetchLayer:
        found = self._layers[layer]
        assert found is not None
        return found

    def _tables(self, device: torch.device, copies_of_one: int) -> tuple[Tensor, Tensor]:
        """Returns int64 [1 + copies_of_one n, 3] and [3 n, 4], zeros, aligned to 16 bytes. n: experts that are fetched
        at once."""
        room = MATRICES * len(self._staging)
        size = 3 * (1 + copies_of_one * len(self._staging))
        copies = torch.zeros(size + size % 2, dtype=torch.int64, device=device)[:size].view(-1, 3)
        return copies, torch.zeros(room, 4, dtype=torch.int64, device=device)

    def _geometry(self, layer: SlotLayer, panels: Tensor, m: int, row: int, step: int) -> list[int]:
        planes = layer.planes[m]
        tensors = (planes.codes, planes.scales, planes.supers)
        assert len(tensors) == PLANES
        return [
            self._staging.data_ptr() + layer.offsets[m], row, step,
            *(tensor.data_ptr() if tensor.numel() else 0 for tensor in tensors),
            *(tensor.nbytes // planes.experts for tensor in tensors),
            *(n for piece in layer.pieces[m] for n in (panels.data_ptr() + piece.start, piece.each, piece.offset)),
        ]  # fmt: skip
