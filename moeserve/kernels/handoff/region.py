"""The memory that GPU and CPU share: pinned, so that the GPU reads and writes it over PCIe while a kernel runs.

    requests   int64   [layers, 16]      a line each        GPU    the step's number; above it the number of rows
    answers    int32   [layers, 32]      a line each        both   0 by the GPU before a request, 1 by the CPU
    slots[0] for even layers, slots[1] for odd ones:
      q8       uint8   [tokens, 1.5 * hidden]               GPU    rows as int8, in the layout of csrc/arch/kernels.h
      f32      float32 [tokens, hidden]                     GPU    rows as floats
      ids      int32   [tokens, top_k]                      GPU    indices among the CPU's experts, -1: none
      weights  float32 [tokens, top_k]                      GPU
      result   float32 [tokens, hidden]                     CPU    sum of the CPU experts' outputs

csrc/handoff/handoff.h says when each side writes. q8 and f32 exist only if the experts' types read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels import _C

PAGE = 4096
LINE: int = _C.Handoff.FLAG_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    q8: Tensor | None
    f32: Tensor | None
    ids: Tensor
    weights: Tensor
    result: Tensor

    def native(self, hidden: int) -> _C.HandoffSlot:
        at = [t.data_ptr() for t in (self.ids, self.weights, self.result)]
        return _C.HandoffSlot(_C.Activations(self.f32, self.q8, hidden), *at)


class Region:
    def __init__(
        self,
        layers: int,
        tokens: int,
        hidden: int,
        top_k: int,
        *,
        floats: bool,
        integers: bool,
        pinned: bool,
    ) -> None:
        """Allocates the memory. Raises RuntimeError (torch's) if it cannot be pinned."""
        sizes = [layers * LINE, layers * LINE]
        rows = [
            _C.quantized_row_bytes(hidden) if integers else 0,
            4 * hidden if floats else 0,
            4 * top_k,
            4 * top_k,
            4 * hidden,
        ]
        sizes += [tokens * row for row in rows] * 2
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // PAGE) * PAGE)
        self.memory = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=pinned)
        parts = [self.memory[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        self.requests = parts[0].view(torch.int64).view(layers, -1)
        self.answers = parts[1].view(torch.int32).view(layers, -1)
        self.slots = (self._slot(parts[2:7], tokens), self._slot(parts[7:], tokens))

    @staticmethod
    def _slot(parts: list[Tensor], tokens: int) -> Slot:
        q8, f32, ids, weights, result = parts
        return Slot(
            q8.view(tokens, -1) if len(q8) else None,
            f32.view(torch.float32).view(tokens, -1) if len(f32) else None,
            ids.view(torch.int32).view(tokens, -1),
            weights.view(torch.float32).view(tokens, -1),
            result.view(torch.float32).view(tokens, -1),
        )
