"""A model on the GPU engine's decoder, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.attention.op import prefill_tiles
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.ram_experts import load_ram_experts
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.gemma_file import VOCAB

TOKENS = [(37 * i * i + 11 * i) % VOCAB for i in range(22)]
LENGTH = 32


class GpuModel:
    """A model on the device, driven by hand: one sequence, whose KV is in the slots of its positions."""

    def __init__(self, model: Path, in_ram: list[int], window_slots: int = 0) -> None:
        """in_ram: experts of each layer. window_slots: of windowed layers, which positions have in turn; 0: they have
        the others'."""
        source, device = open_model(model), torch.device(DEVICE)
        self.shape = shape = read_shape(source)
        ids = [[e for e in range(layer.num_experts) if e not in in_ram] for layer in shape.layers]
        weights = GpuLoader(source, shape, device, lambda *_: None).load(ids)
        kv = KvCache(
            KvLayout(shape),
            LENGTH,
            range(shape.num_layers),
            device,
            zeroed=True,
            num_window_slots=window_slots,
        ).layers
        table = torch.zeros(2, LENGTH, dtype=torch.int32, device=device)
        windows = torch.zeros_like(table) if window_slots else None
        self._window_slots = window_slots
        self.handoff = None
        if in_ram:
            stream = stream_of(ISAS[-1])
            experts = load_ram_experts(
                *(stream, source, shape, [in_ram if layer.moe else [] for layer in shape.layers], device),
                lambda *_: None,
            )
            self.handoff = ExpertHandoff(
                *(stream, experts.layers, 32, shape.experts_input_width, shape.top_k, device)
            )
        self.decoder = GpuDecoder(shape, weights, kv, table, 32, LENGTH, self.handoff, window_table=windows)

    def logits(
        self,
        start: int,
        end: int,
        *,
        tiled: bool,
        tokens: Sequence[int] = TOKENS,
        embedded: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Logits of the positions from `start` below `end`, in one step. tiled: as a prompt's; otherwise each position
        attends by itself, a single one as new tokens do. embedded: see `GpuDecoder.place_embeddings`."""
        n = end - start
        size = next(size for size in self.decoder.sizes if size >= n)
        positions, padding = list(range(start, end)), [0] * (size - n)
        batch = GpuBatch(
            counter(n),
            ints([*tokens[start:end], *padding]),
            ints(positions + padding),
            ints(positions + [-1] * len(padding)),
            ints([0] * n + [1] * len(padding)),
            0 if tiled else size,
            self._tiles(start, n) if tiled else None,
            rows_independent=n == 1,
            window_slots=self._windows(positions, len(padding)),
        )
        self.decoder.begin(batch)
        self.decoder.place_embeddings(size, embedded)
        self.decoder.forward(batch)
        logits = self.decoder.logits(size, ints(list(range(n)) + padding), counter(n))[:n].cpu().clone()
        self.decoder.check()
        return logits

    def _windows(self, positions: list[int], padding: int) -> torch.Tensor | None:
        if not self._window_slots:
            return None
        return ints([position % self._window_slots for position in positions] + [-1] * padding)

    def _tiles(self, start: int, n: int) -> tuple[torch.Tensor, ...]:
        row, count, position, request = (np.array([value], np.int32) for value in (0, n, start, 0))
        tiles = [
            prefill_tiles(row, count, position, request, form.num_heads, form.num_kv_heads, form.head_dim)
            for form in self.shape.forms
        ]
        return tuple(torch.from_numpy(each).to(DEVICE) for each in tiles)
