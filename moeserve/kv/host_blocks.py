"""RAM for pages of KV in blocks of one size; next to a GPU, pinned, so that it copies to and from them by itself."""

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

CHUNK_BYTES = 16 << 20  # that is allocated and pinned at once: what a GPU is given waits for it
PAUSE = 3.0  # between two chunks that are pinned ahead, times as long as the first of them took

log = logging.getLogger(__name__)


class HostPage(NamedTuple):
    """A page or a state in some blocks."""

    parts: list[Tensor]  # uint8, one after another
    blocks: list[int]

    def buffer(self) -> Tensor:
        """uint8 for all of it: its own memory where that is one block."""
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.empty(sum(len(part) for part in self.parts), dtype=torch.uint8)

    def joined(self) -> Tensor:
        """All of it; a copy where there are several blocks."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def fill(self, whole: Tensor) -> None:
        """Copies all of it from `whole`, which may be its `buffer` or on a GPU: then on the current stream."""
        for part, piece in self._pieces(whole):
            if part.data_ptr() != piece.data_ptr():
                part.copy_(piece, non_blocking=True)

    def copy_to(self, whole: Tensor) -> None:
        """Copies all of it to `whole`, which may be on a GPU: then on the current stream."""
        for part, piece in self._pieces(whole):
            piece.copy_(part, non_blocking=True)

    def _pieces(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.parts, torch.split(whole, [len(part) for part in self.parts]), strict=True)


class HostBlocks:
    """May be used by several threads. Memory comes by chunks, with its first use or by `grow_all`, and stays."""

    def __init__(self, block_bytes: int, max_bytes: int, *, pinned: bool) -> None:
        self.block_bytes = block_bytes
        self.is_pinned = pinned
        self._most = max_bytes // block_bytes
        self._chunk = max(1, min(self._most, CHUNK_BYTES // block_bytes))
        self._lock = threading.Lock()  # of what follows
        self._growing = threading.Lock()
        self._chunks: list[Tensor] = []
        self._free: list[int] = []
        self._pinned: list[int] = []  # their addresses
        if pinned:
            weakref.finalize(self, unpin, self._pinned)

    @property
    def max_bytes(self) -> int:
        return self._most * self.block_bytes

    def take(self, num_bytes: int) -> HostPage | None:
        """Room for `num_bytes` bytes; None: there is none."""
        count = -(-num_bytes // self.block_bytes)
        while True:
            with self._lock:
                if len(self._free) >= count:
                    blocks = [self._free.pop() for _ in range(count)]
                    return HostPage(self._parts(blocks, num_bytes), blocks)
            if not self.grow():
                return None

    def give(self, page: HostPage) -> None:
        """Back what `take` has returned."""
        with self._lock:
            self._free += page.blocks

    def grow_all(self) -> None:
        """Allocates all of it: to pin a chunk takes longer than a step may wait. What a GPU is given meanwhile waits,
        too, so that there are pauses for that."""
        began = time.perf_counter()
        while self.grow():
            if self.is_pinned:
                time.sleep(PAUSE * (time.perf_counter() - began))
            began = time.perf_counter()

    def grow(self) -> bool:
        """Adds a chunk; False: there are all, or the machine has no more memory."""
        with self._growing:
            first = len(self._chunks) * self._chunk
            count = min(self._chunk, self._most - first)
            if count <= 0:
                return False
            try:
                chunk = self._allocate()
            except (RuntimeError, MemoryError) as error:
                self._most = first
                log.warning("RAM for pages of KV ends at %d MiB: %s", self.max_bytes >> 20, error)
                return False
            with self._lock:
                self._chunks.append(chunk)
                self._free += reversed(range(first, first + count))
            return True

    def _allocate(self) -> Tensor:
        """A chunk's memory. The machine gives it while it is written to, not while the driver pins it: a machine that
        takes long for that would hold up the GPU."""
        if not self.is_pinned:
            return torch.empty(self._chunk, self.block_bytes, dtype=torch.uint8)
        chunk = torch.full((self._chunk, self.block_bytes), 1, dtype=torch.uint8)
        self._pinned.append(pin(chunk))
        return chunk

    def _parts(self, blocks: list[int], num_bytes: int) -> list[Tensor]:
        parts = [self._chunks[block // self._chunk][block % self._chunk] for block in blocks]
        parts[-1] = parts[-1][: num_bytes - (len(blocks) - 1) * self.block_bytes]
        return parts
