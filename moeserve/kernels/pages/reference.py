"""The specification, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def page_bytes(rows: Sequence[Tensor], page_slots: int) -> int:
    """Bytes of a page of `page_slots` slots. rows: uint8 [slots, bytes of a slot] each."""
    return page_slots * sum(each.shape[1] for each in rows)


def gather_pages(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> None:
    """Copies slots to pages. rows: uint8 [slots, bytes of a slot] each. slots: int64 [pages * slots of a page]. pages:
    uint8 [pages, bytes of a page]."""
    for tensor, index, part in _parts(rows, slots, pages):
        torch.index_select(tensor, 0, index, out=part)


def scatter_pages(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> None:
    """Copies pages to slots, the same the other way."""
    for tensor, index, part in _parts(rows, slots, pages):
        tensor.index_copy_(0, index, part)


def _parts(rows: Sequence[Tensor], slots: Tensor, pages: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(a tensor, a page's slots, their place in the page) of each page and tensor."""
    page_slots = len(slots) // len(pages)
    sizes = [page_slots * tensor.shape[1] for tensor in rows]
    for index, page in zip(torch.split(slots, page_slots), pages, strict=True):
        for tensor, part in zip(rows, torch.split(page, sizes), strict=True):
            yield tensor, index, part.view(page_slots, -1)
