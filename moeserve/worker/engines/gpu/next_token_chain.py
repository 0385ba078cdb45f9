"""Chains of drafts by the next-token block: one upload, one CUDA graph a draft, one wait at the end."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moeserve.models.blocks.gpu.next_token import GpuNextTokenBlock
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.pinned import pinned_copy
from moeserve.worker.engines.gpu.steps.step_path import padded_size
from moeserve.worker.sequences import Int32s

_ROW_COLUMNS = 7  # of `ChainInputs.columns`, before the planned slots


class ChainStart(NamedTuple):
    """The first rows of a chain; int32 [n] each, but kv_slots."""

    token_ids: Int32s
    positions: Int32s  # of the block's rows: one less than the token's
    req_slots: Int32s
    most: Int32s  # drafts of each
    kv_slots: Int32s  # [depths, n]: of the tokens' positions, by depth


class NextTokenChain:
    """Owns the graphs, by the number of rows. Single-threaded, as the engine is."""

    def __init__(self, block: GpuNextTokenBlock, device: torch.device, most_requests: int) -> None:
        self._block = block
        self._device = device
        self._most_requests = most_requests
        self._graphs = CudaGraphs(device)
        self._links: dict[int, Launches] = {}
        chain = block.chain
        is_gpu = device.type == "cuda"
        self._pinned = torch.zeros(chain.columns.shape, dtype=torch.int32, pin_memory=is_gpu)
        self._host: Int32s = self._pinned.numpy()
        self._found = torch.zeros(chain.outputs.shape, pin_memory=is_gpu)
        self._end = torch.cuda.Event() if is_gpu else None

    @property
    def most_rows(self) -> int:
        """Requests for which one chain drafts."""
        return self._block.chain_sizes[-1]

    # ---------------------------------------------------------------- before the first step

    def compile(self) -> None:
        """Compiles a chain's kernels. Inside `compile_ahead`, where nothing is executed."""
        for size in self._block.chain_sizes:
            self._block.link(size)
        self.keep(*np.zeros((3, 1), np.int32))

    def capture(self) -> None:
        """Captures a graph for each number of rows, in rows that are no request's."""
        self._clear()
        for size in self._block.chain_sizes:
            self._links[size] = self._graphs.capture(partial(self._block.link, size), self._clear)

    def _clear(self) -> None:
        self._block.chain.columns.zero_()

    # ---------------------------------------------------------------- between steps

    def forget(self, slot: int) -> None:
        """Launches: the request slot has no state."""
        self.keep(*np.array([[slot], [-1], [0]], np.int32))

    def keep(self, slots: Int32s, rows: Int32s, positions: Int32s) -> None:
        """Launches: the states before `positions` of these request slots are those of the last step's `rows`."""
        chosen = np.zeros((3, -(-max(self._most_requests, len(slots)) // 4) * 4), np.int32)
        chosen[:, : len(slots)] = slots, rows, positions
        self._block.keep_rows(pinned_copy(chosen, self._device), len(slots))

    def draft(self, start: ChainStart) -> tuple[Int32s, npt.NDArray[np.float32]]:
        """Returns tokens and their probabilities, [depths, n] each; those behind a row's `most` are invalid. Waits for
        the device."""
        n, depths = len(start.token_ids), int(start.most.max())
        size, host = padded_size(n, self._block.chain_sizes), self._host
        host[:_ROW_COLUMNS] = 0
        token_ids, positions, kv_slots, _, most, req_slots, count = host[:_ROW_COLUMNS, :n]
        token_ids[:], positions[:], kv_slots[:] = start.token_ids, start.positions, start.kv_slots[0]
        most[:], req_slots[:] = start.most, start.req_slots
        count[0] = n
        host[_ROW_COLUMNS : _ROW_COLUMNS + depths, :n] = start.kv_slots[:depths]
        self._block.chain.columns.copy_(self._pinned, non_blocking=True)
        self._block.begin(size)
        link = self._links[size]
        for _ in range(depths):
            link()
        self._found.copy_(self._block.chain.outputs, non_blocking=True)
        self._wait()
        drafts, probabilities = self._found.numpy()[:, :depths, :n]
        return drafts.view(np.int32).copy(), probabilities.copy()

    def _wait(self) -> None:
        if self._end is not None:
            self._end.record()
            self._end.synchronize()
