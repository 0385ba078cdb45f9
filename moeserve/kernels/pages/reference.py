"""The specification of page copies, which is also the CPU's implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def page_bytes(rows: Sequence[Tensor], page_slots: int) -> int:
    """Returns the bytes of a page of `page_slots` slots. rows: uint8 [slots, bytes per slot] each."""
    return page_slots * sum(each.shape[1] for each in rows)


def gather_pages(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> None:
    """Copies slots to pages. rows: uint8 [slots, bytes per slot] each. slots: int64 [pages * slots per page]. pages:
    uint8 [pages, bytes per page]."""
    for tensor, index, part in _parts(rows, slots, pages):
        torch.index_select(tensor, 0, index, out=part)


def scatter_pages(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> None:
    """Copies pages to slots; arguments as in `gather_pages`."""
    for tensor, index, part in _parts(rows, slots, pages):
        tensor.index_copy_(0, index, part)


def _parts(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (tensor, slots of a page, their bytes in the page) for each page and tensor."""
    page_slots = len(slots) // len(pages)
    sizes = [page_slots * tensor.shape[1] for tensor in rows]
    for index, page in zip(torch.split(slots, page_slots), pages, strict=True):
        for tensor, part in zip(rows, torch.split(page, sizes), strict=True):
            yield tensor, index, part.view(page_slots, -1)
