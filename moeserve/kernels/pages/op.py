"""Copies all pages and tensors in one launch: two hundred torch launches would take the host longer than the PCIe
transfer."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from moeserve.kernels.launch import kernel, next_power_of_2

MOST_WORDS = 1024  # words that a program copies at a time


@kernel
def move_pages_kernel(
    slots,
    pages,
    tensors,
    TO_PAGES: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies rows from KV slots to pages (TO_PAGES), or from pages to KV slots. Grid (slots of all pages, tensors).
    slots: int64. pages: int32, or int16 if rows are not a multiple of 4 bytes; a word is one of these. tensors: int64
    [tensors, 3]: address, words per slot, words before it in a page."""
    index, tensor = tl.program_id(0), tl.program_id(1)
    address = tl.load(tensors + 3 * tensor)
    words = tl.load(tensors + 3 * tensor + 1)
    before = tl.load(tensors + 3 * tensor + 2)
    page, place = index // PAGE_SLOTS, index % PAGE_SLOTS
    row = address.to(pages.dtype) + tl.load(slots + index) * words
    copy = pages + page.to(tl.int64) * PAGE_WORDS + before + place * words
    w = tl.arange(0, WORDS)
    for first in range(0, words.to(tl.int32), WORDS):
        at = first + w
        if TO_PAGES:
            tl.store(copy + at, tl.load(row + at, at < words), at < words)
        else:
            tl.store(row + at, tl.load(copy + at, at < words), at < words)


class PageRows:
    """The rows of some tensors on a GPU; launches on the current stream."""

    def __init__(self, rows: Sequence[Tensor], page_slots: int) -> None:
        """rows: uint8 [slots, bytes per slot] each."""
        self._rows = rows  # must stay at their addresses during this object's life
        self._page_slots = page_slots
        sizes = [tensor.shape[1] for tensor in rows]
        self._word = torch.int32 if all(size % 4 == 0 for size in sizes) else torch.int16
        width = self._word.itemsize
        table, before = [], 0
        for tensor, size in zip(rows, sizes, strict=True):
            table.append([tensor.data_ptr(), size // width, before // width])
            before += page_slots * size
        self._tensors = torch.tensor(table, dtype=torch.int64, device=rows[0].device)
        self._page_words = before // width
        self._words = min(MOST_WORDS, next_power_of_2(max(sizes) // width))

    def gather(self, slots: Tensor, pages: Tensor) -> None:
        """Launches the copy of the KV slots' rows to pages, on the current stream. slots: int64 [pages * slots per
        page]; pages: uint8 [pages, bytes per page], written; both on the GPU."""
        self._move(slots, pages, to_pages=True)

    def scatter(self, slots: Tensor, pages: Tensor) -> None:
        """Launches the copy of pages to the KV slots' rows, on the current stream. slots: int64 [pages * slots per
        page]; pages: uint8 [pages, bytes per page]; both on the GPU."""
        self._move(slots, pages, to_pages=False)

    def _move(self, slots: Tensor, pages: Tensor, *, to_pages: bool) -> None:
        move_pages_kernel(
            (len(slots), len(self._rows)),
            slots,
            pages.view(self._word),
            self._tensors,
            to_pages,
            self._page_slots,
            self._page_words,
            self._words,
            num_warps=4,
        )
