"""Chains of drafts by the next-token block or an EAGLE-3 head: one upload, one CUDA graph a draft, no wait between.

`draft` waits for the drafts. Between `launch` and `found` the host may launch the step that verifies them: `place` puts
them there on the device, as the step's tokens. A chain may be launched after a step whose tokens the host does not
know yet (`AfterStep`): the device accepts that step's drafts and finds where the chain begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.next_token.op import SampledStep
from moeserve.models.blocks.gpu.chain_inputs import ChainInputs
from moeserve.models.blocks.gpu.drafting_block import GpuDraftingBlock
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.engines.gpu.steps.step_path import padded_size
from moeserve.worker.sequences import Int32s


class AfterStep(NamedTuple):
    """The rows before a chain in the step that is being sampled: see `SampledRows`. int32 [n] each, but places [1 +
    depths of the step, n] and slots [depths of both, n]."""

    rows: Int32s
    drafted: Int32s
    positions: Int32s
    shifts: Int32s
    places: Int32s
    slots: Int32s


class ChainStart(NamedTuple):
    """The first rows of a chain; int32 [n] each, but kv_slots."""

    token_ids: Int32s
    positions: Int32s  # of the block's rows: one less than the token's
    req_slots: Int32s
    most: Int32s  # drafts of each
    kv_slots: Int32s  # [depths, n]: of the tokens' positions, by depth
    panels: Int32s | None = None  # of the vocabulary, ascending, that are scored; None: all
    least: npt.NDArray[np.float32] | float = 0.0  # [n]: the probability from which drafts are verified
    # [depths, n, sections]: RoPE positions of the rows, by depth; None: `positions` and those after
    rotary: Int32s | None = None
    after_step: AfterStep | None = (
        None  # the device finds tokens, positions and KV slots; None: they are given
    )


class _Room:
    """The host's side of a chain: its pinned inputs and outputs, and its beginning and end by the GPU's clock."""

    def __init__(self, chain: ChainInputs, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.pinned = torch.zeros(chain.buffer.shape, dtype=torch.int32, pin_memory=is_gpu)
        self.columns = chain.columns(self.pinned)
        self.found = torch.zeros(chain.outputs.shape, pin_memory=is_gpu)
        self.ends = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_gpu)]

    def mark(self, end: int) -> None:
        if self.ends:
            self.ends[end].record()


class LaunchedChain(NamedTuple):
    """A chain whose drafts the host does not know; valid until the next but one is launched."""

    room: _Room
    depths: int
    rows: int

    def found(self) -> tuple[Int32s, npt.NDArray[np.float32]]:
        """Waits for the chain. Returns tokens and their probabilities, [depths, n] each; those after a row's `most`
        are invalid."""
        if self.room.ends:
            self.room.ends[1].synchronize()
        drafts, probabilities = self.room.found.numpy()[:, : self.depths, : self.rows]
        return drafts.view(np.int32).copy(), probabilities.copy()

    @property
    def ms(self) -> float:
        """Milliseconds that the chain took the GPU, after `found`; 0: unknown."""
        return float(self.room.ends[0].elapsed_time(self.room.ends[1])) if self.room.ends else 0.0


class NextTokenChain:
    """Owns the graphs, by the number of rows and whether they read a shortlist. Single-threaded, as the engine is."""

    def __init__(
        self,
        block: GpuDraftingBlock,
        device: torch.device,
        most_requests: int,
        sampled: Callable[[], SampledStep],
    ) -> None:
        """sampled: returns the engine's last step, for chains that begin after it."""
        self._block = block
        self._sampled = sampled
        self._device = device
        self._most_requests = most_requests
        self._graphs = CudaGraphs(device)
        self._links: dict[tuple[int, bool], Launches] = {}
        # Two, because a chain may be launched before the drafts of the one before it are read.
        self._rooms = [_Room(block.chain, device) for _ in range(2)]

    @property
    def most_rows(self) -> int:
        """Requests for which one chain drafts."""
        return self._block.chain_sizes[-1]

    @property
    def width(self) -> int:
        """Distance, in the chain's output, between a request's draft and its next one; for `place`."""
        return self._block.chain.width

    @property
    def depths(self) -> int:
        """Most drafts of a request."""
        return self._block.chain.depths

    @property
    def has_sections(self) -> bool:
        """True if rows rotate by several positions each, where pictures have them."""
        return self._block.chain.rows.rotary is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that are scored."""
        return self._block.vocab_size

    @property
    def frequent_tokens(self) -> int | None:
        """Returns the number of tokens that a shortlist always has: all, if they are numbered otherwise than the
        text's; None: the usual part of the vocabulary."""
        return -(-self.vocab_size // PANEL_ROWS) * PANEL_ROWS if self._block.has_ids else None

    # ---------------------------------------------------------------- before the first step

    def compile(self) -> None:
        """Compiles a chain's kernels. Must be called inside `compile_ahead`, where launches only compile and nothing is
        executed."""
        for size, of_shortlist in self._kinds():
            self._block.link(size, of_shortlist=of_shortlist)
        self.keep(*np.zeros((3, 1), np.int32))
        self._block.begin_after_step(1, self._sampled())
        self.place(self._block.chain.rows.token_ids, self._block.chain.count)

    def capture_each(self) -> Iterator[None]:
        """Returns an iterator that captures the graphs of the chain's links, one at each `next`, between two steps and
        without rows. Links that are not captured are launched kernel by kernel."""
        for size, of_shortlist in self._kinds():
            link = partial(self._block.link, size, of_shortlist=of_shortlist)
            self._links[size, of_shortlist] = self._graphs.capture(link, self._clear)
            yield

    def _kinds(self) -> list[tuple[int, bool]]:
        sizes = self._block.chain_sizes
        return [(size, False) for size in sizes] + [
            (size, True) for size in sizes if self._block.takes_shortlist(size)
        ]

    def _clear(self) -> None:
        self._block.chain.buffer.zero_()

    # ---------------------------------------------------------------- between steps

    def forget(self, slot: int) -> None:
        """Launches the loss of a request slot's state: its next draft begins without one."""
        self.keep(*np.array([[slot], [-1], [0]], np.int32))

    def keep(self, slots: Int32s, rows: Int32s, positions: Int32s) -> None:
        """Launches a copy: these request slots keep the hidden states of the last step's `rows`, which precede
        `positions`."""
        chosen = np.zeros((3, -(-max(self._most_requests, len(slots)) // 4) * 4), np.int32)
        chosen[:, : len(slots)] = slots, rows, positions
        self._block.keep_rows(pinned_copy(chosen, self._device), len(slots))

    def draft(self, start: ChainStart) -> tuple[Int32s, npt.NDArray[np.float32]]:
        """Launches a chain of drafts and waits for it. Returns the draft tokens, int32 [depths, rows], and their
        probabilities, float32 of the same shape; those after a row's `most` are invalid."""
        return self.launch(start).found()

    def launch(self, start: ChainStart) -> LaunchedChain:
        """Launches a chain. The previous chain may still be running; the chain before that must have ended."""
        self._rooms.reverse()
        room, depths = self._rooms[0], int(start.most.max())
        launched = LaunchedChain(room, depths, len(start.token_ids))
        size = padded_size(launched.rows, self._block.chain_sizes)
        of_shortlist = start.panels is not None and self._block.takes_shortlist(size)
        _fill(room, start, depths, with_panels=of_shortlist)
        room.mark(0)
        self._block.chain.buffer.copy_(room.pinned, non_blocking=True)
        if start.after_step is None:
            self._block.begin(size)
        else:
            self._block.begin_after_step(size, self._sampled())
        link = self._links.get((size, of_shortlist))
        for _ in range(depths):
            if link is None:
                self._block.link(size, of_shortlist=of_shortlist)
            else:
                link()
        room.found.copy_(self._block.chain.outputs, non_blocking=True)
        room.mark(1)
        return launched

    def place(self, ids: Tensor, count: Tensor) -> None:
        """Launches, in a step of one request, the replacement of placeholders by the last chain's drafts: -1 - i
        becomes draft i / `width`. Rows from the first unlikely draft on are left out. ids: int32 [n], count: int32
        [1]."""
        self._block.place_drafts(ids, count)


def _fill(room: _Room, start: ChainStart, depths: int, *, with_panels: bool) -> None:
    """Fills the pinned inputs of a chain."""
    host, n, after = room.columns, len(start.token_ids), start.after_step
    room.pinned.zero_()
    columns = [(host.most, start.most), (host.req_slots, start.req_slots)]
    if after is None:
        columns += [
            (host.token_ids, start.token_ids),
            (host.positions, start.positions),
            (host.kv_slots, start.kv_slots[0]),
        ]
        host.planned_slots.numpy()[:depths, :n] = start.kv_slots[:depths]
    else:
        columns += [
            (host.rows, after.rows),
            (host.drafted, after.drafted),
            (host.sampled_positions, after.positions),
            (host.shifts, after.shifts),
        ]
        host.places.numpy()[: len(after.places), :n] = after.places
        host.slots.numpy()[: len(after.slots), :n] = after.slots
    for column, values in columns:
        column.numpy()[:n] = values
    host.count[0] = n
    host.least.view(torch.float32).numpy()[:n] = start.least
    if host.rotary.numel() and after is None:
        rotary = start.rotary
        if rotary is None:
            rotary = (start.positions + np.arange(depths, dtype=np.int32)[:, None])[..., None]
        host.rotary.numpy()[:n] = rotary[0]
        host.planned_rotary.numpy()[:depths, :n] = rotary
    if with_panels and start.panels is not None:
        host.num_panels[0] = len(start.panels)
        host.panels.numpy()[: len(start.panels)] = start.panels
