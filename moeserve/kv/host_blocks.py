"""Allocates RAM for KV pages in blocks of equal size, in pinned memory for a GPU so that its copy engine can access
it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.host_pinning import pin, unpin

# allocated and pinned at once; other CUDA calls wait during the pinning, so it is kept small
CHUNK_BYTES = 16 << 20
# pause between two chunks that `grow_all` pins, as a multiple of the time that the first chunk took
PAUSE = 3.0

log = logging.getLogger(__name__)


class HostPage(NamedTuple):
    """A KV page or a recurrent state in RAM, stored in one or several blocks of equal size in bytes."""

    parts: list[Tensor]  # uint8, in order
    blocks: list[int]

    def buffer(self) -> Tensor:
        """Returns a uint8 tensor of the page's size: the page's own memory if it has one block, else a new one."""
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.empty(sum(len(part) for part in self.parts), dtype=torch.uint8)

    def joined(self) -> Tensor:
        """Returns the page's bytes as one uint8 tensor; a copy if the page has several blocks."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def fill(self, whole: Tensor) -> None:
        """Copies `whole` (uint8, the page's size) into the page. `whole` may be the page's own `buffer`, or on a GPU:
        then the current stream copies."""
        for part, piece in self._pieces(whole):
            if part.data_ptr() != piece.data_ptr():
                part.copy_(piece, non_blocking=True)

    def copy_to(self, whole: Tensor) -> None:
        """Copies the page to `whole` (uint8, the page's size). If `whole` is on a GPU, the current stream copies."""
        for part, piece in self._pieces(whole):
            piece.copy_(part, non_blocking=True)

    def _pieces(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.parts, torch.split(whole, [len(part) for part in self.parts]), strict=True)


class HostBlocks:
    """A thread-safe allocator of blocks. It allocates chunks at first use or in `grow_all`, and never frees them."""

    def __init__(self, block_bytes: int, max_bytes: int, *, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self.is_pinned = pinned
        self._most = max_bytes // block_bytes
        self._chunk = max(1, min(self._most, CHUNK_BYTES // block_bytes))
        self._lock = threading.Lock()  # guards the attributes below
        self._growing = threading.Lock()
        self._chunks: list[Tensor] = []
        self._free: list[int] = []
        self._pinned: list[int] = []  # addresses of the pinned chunks
        if pinned:
            weakref.finalize(self, unpin, self._pinned)

    @property
    def max_bytes(self) -> int:
        return self._most * self.block_bytes

    def take(self, num_bytes: int) -> HostPage | None:
        """Allocates blocks for `num_bytes` bytes; None if not enough blocks are free."""
        count = -(-num_bytes // self.block_bytes)
        while True:
            with self._lock:
                if len(self._free) >= count:
                    blocks = [self._free.pop() for _ in range(count)]
                    return HostPage(self._parts(blocks, num_bytes), blocks)
            if not self.grow():
                return None

    def give(self, page: HostPage) -> None:
        """Frees a page that `take` returned."""
        with self._lock:
            self._free += page.blocks

    def grow_all(self) -> None:
        """Allocates all chunks ahead of use, because pinning a chunk takes longer than a step may wait. It pauses
        between chunks, because other CUDA calls wait while one is pinned."""
        began = time.perf_counter()
        while self.grow():
            if self.is_pinned:
                time.sleep(PAUSE * (time.perf_counter() - began))
            began = time.perf_counter()

    def grow(self) -> bool:
        """Allocates one chunk. Returns False if all chunks exist or the machine is out of memory."""
        with self._growing:
            first = len(self._chunks) * self._chunk
            count = min(self._chunk, self._most - first)
            if count <= 0:
                return False
            try:
                chunk = self._allocate()
            except (RuntimeError, MemoryError) as error:
                self._most = first
                log.warning("no more than %d MiB of RAM for pages of KV: %s", self.max_bytes >> 20, error)
                return False
            with self._lock:
                self._chunks.append(chunk)
                self._free += reversed(range(first, first + count))
            return True

    def _allocate(self) -> Tensor:
        """Allocates a chunk and touches its memory before the driver pins it: the machine may take long to supply
        the pages, and during the pinning that would block the GPU."""
        if not self.is_pinned:
            return torch.empty(self._chunk, self.block_bytes, dtype=torch.uint8)
        chunk = torch.full((self._chunk, self.block_bytes), 1, dtype=torch.uint8)
        self._pinned.append(pin(chunk))
        return chunk

    def _parts(self, blocks: list[int], num_bytes: int) -> list[Tensor]:
        parts = [self._chunks[block // self._chunk][block % self._chunk] for block in blocks]
        parts[-1] = parts[-1][: num_bytes - (len(blocks) - 1) * self.block_bytes]
        return parts
