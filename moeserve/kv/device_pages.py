"""Copies between the slots of a KV or state cache in GPU memory and pages in RAM, on CUDA streams beside the steps.

    slots --kernel, before the step--> staging --copy engine, beside the step--> page in RAM
    page in RAM --copy engine--> staging --kernel--> slots                       beside steps that use other slots

Pages in pinned RAM are copied at PCIe speed. CUDA events order the reuse of the staging buffers, so no CPU thread
waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.pages.reference import gather_pages, scatter_pages
from moeserve.kv.cache_pages import CachePages, Move, Wait, index_of
from moeserve.kv.tier_sizes import STAGING_BYTES

MovePages = Callable[[Tensor, Tensor], None]


class Staging:
    """Staging buffers in GPU memory, one per direction. On a CPU (used by tests) there are no streams."""

    def __init__(self, device: torch.device, page_bytes: int) -> None:
        """page_bytes: size of the largest page or state."""
        size = max(STAGING_BYTES, page_bytes)
        self.device = device
        self.out, self.into = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        self.lock = threading.Lock()  # guards `into` and its stream
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            self.out_stream, self.into_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.out_is_free = torch.cuda.Event()
            self.out_is_free.record()


class DevicePages(CachePages):
    """`CachePages` for a cache in GPU memory."""

    def __init__(self, tensors: Sequence[Tensor], page_slots: int, staging: Staging) -> None:
        super().__init__(tensors, page_slots)
        self._staging = staging
        self._most = max(1, len(staging.out) // self.page_bytes)  # pages per batch
        self._gather, self._scatter = self._kernels()

    def _kernels(self) -> tuple[MovePages, MovePages]:
        if not self._staging.is_gpu or self.page_slots == 1:
            return (
                lambda slots, pages: gather_pages(self._rows, slots, pages),
                lambda slots, pages: scatter_pages(self._rows, slots, pages),
            )
        # imported late: a machine without a GPU may lack Triton
        from moeserve.kernels.pages.op import PageRows

        rows = PageRows(self._rows, self.page_slots)
        return rows.gather, rows.scatter

    def compile(self) -> None:
        """Compiles the kernels by running each once, before the first step; the contents of slot 0 stay unchanged."""
        slots = np.zeros(self.page_slots, np.int32)
        index = index_of(slots).to(self._staging.device)
        pages = self._staging.out[: self.page_bytes].view(1, -1)
        self._gather(index, pages)
        self._scatter(index, pages)

    def out(self, moves: Sequence[Move]) -> Wait:
        staging = self._staging
        if not staging.is_gpu:
            for batch in self._batches(moves):
                pages = self._gathered(batch)
                for whole, (_, page) in zip(pages, batch, strict=True):
                    page.fill(whole)
            return lambda: None
        step = torch.cuda.current_stream(staging.device)
        for batch in self._batches(moves):
            step.wait_event(staging.out_is_free)
            pages = self._gathered(batch)
            staging.out_stream.wait_stream(step)
            with torch.cuda.stream(staging.out_stream):
                for whole, (_, page) in zip(pages, batch, strict=True):
                    page.fill(whole)
                # blocking: a thread that waits for the event sleeps
                staging.out_is_free = torch.cuda.Event(blocking=True)
                staging.out_is_free.record()
        return self._waiting(staging.out_is_free)

    def mark(self) -> object:
        if not self._staging.is_gpu:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._staging.device))
        return event

    def reach(self, mark: object) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def into(self, moves: Sequence[Move], mark: object) -> None:
        staging = self._staging
        with staging.lock:
            if not staging.is_gpu:
                for batch in self._batches(moves):
                    self._scattered(batch)
                return
            with torch.cuda.stream(staging.into_stream):
                assert isinstance(mark, torch.cuda.Event)
                staging.into_stream.wait_event(mark)
                for batch in self._batches(moves):
                    self._scattered(batch)
                done = torch.cuda.Event(blocking=True)
                done.record()
        done.synchronize()

    def _gathered(self, batch: Sequence[Move]) -> Tensor:
        """Returns the batch's pages, gathered in the staging buffer: uint8 [pages, page_bytes]."""
        pages = self._pages(self._staging.out, len(batch))
        self._gather(self._slots(batch), pages)
        return pages

    def _scattered(self, batch: Sequence[Move]) -> None:
        pages = self._pages(self._staging.into, len(batch))
        for whole, (_, page) in zip(pages, batch, strict=True):
            page.copy_to(whole)
        self._scatter(self._slots(batch), pages)

    def _pages(self, buffer: Tensor, count: int) -> Tensor:
        return buffer[: count * self.page_bytes].view(count, self.page_bytes)

    def _slots(self, batch: Sequence[Move]) -> Tensor:
        slots = index_of(np.concatenate([slots for slots, _ in batch]))
        # the source is pageable memory, so CUDA has read it when this returns
        return slots.to(self._staging.device, non_blocking=True)

    def _batches(self, moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
        return (moves[first : first + self._most] for first in range(0, len(moves), self._most))

    @staticmethod
    def _waiting(event: torch.cuda.Event) -> Wait:
        return event.synchronize
