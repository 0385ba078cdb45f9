"""The inputs and outputs of a chain of drafts on a GPU: one upload, and one download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.next_token.op import ChainRows, SampledRows, ScoredPanels
from moeserve.models.step_buffers import CHAIN_NUMBERS, chain_numbers

ALIGN = 4  # int32s: kernels are compiled for aligned addresses


@dataclass(frozen=True, slots=True)
class ChainColumns:
    """Views of a chain's uploaded inputs: int32 [width] each, except planned_slots [depths, width] and panels."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    depth: Tensor
    most: Tensor
    req_slots: Tensor
    count: Tensor  # first value: valid rows
    num_panels: Tensor  # first value: of the shortlist
    least: Tensor  # first value, as float32: probability from which drafts are verified
    # of a chain after tokens that the host does not know, see `SampledRows`: int32 [width] each
    rows: Tensor
    drafted: Tensor
    sampled_positions: Tensor
    shifts: Tensor
    planned_slots: Tensor  # KV slots of the tokens' positions, by depth
    places: Tensor  # of `SampledRows`: [1 + depths, width]
    slots: Tensor  # of `SampledRows`: [2 * depths, width]
    # RoPE positions, [width, sections], and by depth, [depths, width, sections]; sections is 0 if rows have one each
    rotary: Tensor
    planned_rotary: Tensor
    panels: Tensor  # the shortlist's


class ChainInputs:
    """The inputs of a chain of drafts on the GPU, in one buffer that one copy uploads, and the chain's outputs: the
    drafts and their probabilities."""

    def __init__(self, rows: int, depths: int, panels: int, sections: int, device: torch.device) -> None:
        """panels: maximum number of panels in a shortlist. sections: number of RoPE positions of a row; 0: a single
        one, the token's number."""
        self.width, self.depths, self._panels = -(-rows // ALIGN) * ALIGN, depths, panels
        self._sections = sections
        numbers = chain_numbers(self.width, depths, panels, sections)
        self.buffer = torch.zeros(numbers, dtype=torch.int32, device=device)
        c = self.columns(self.buffer)
        self.req_slots, self.count, self.least = c.req_slots, c.count[:1], c.least[:1].view(torch.float32)
        self.sampled = SampledRows(c.rows, c.drafted, c.sampled_positions, c.shifts, c.places, c.slots)
        self.scored = ScoredPanels(c.panels, c.num_panels[:1])
        self.outputs = torch.zeros(2, depths, self.width, device=device)
        drafts = self.outputs[0].view(torch.int32)
        self.rows = ChainRows(
            c.token_ids,
            c.positions,
            c.kv_slots,
            c.depth,
            c.most,
            c.planned_slots,
            drafts,
            self.outputs[1],
            rotary=c.rotary if sections else None,
            planned_rotary=c.planned_rotary if sections else None,
        )

    def columns(self, buffer: Tensor) -> ChainColumns:
        """Returns views, by name, of another int32 buffer with this object's layout."""
        rows, panels = buffer[: len(buffer) - self._panels], buffer[len(buffer) - self._panels :]
        of_sections = self.width * self._sections
        numbers, first, by_depth = rows.tensor_split(
            [len(rows) - of_sections * (1 + self.depths), len(rows) - of_sections * self.depths]
        )
        *of_rows, of_depths = numbers.view(-1, self.width).tensor_split([*range(1, CHAIN_NUMBERS + 1)])
        kv_slots, places, slots = of_depths.tensor_split([self.depths, 2 * self.depths + 1])
        rotary = first.view(self.width, self._sections)
        planned_rotary = by_depth.view(self.depths, self.width, self._sections)
        first_of = [row[0] for row in of_rows]
        return ChainColumns(*[*first_of, kv_slots, places, slots, rotary, planned_rotary, panels])
