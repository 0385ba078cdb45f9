"""The kernel that moves pages between slots and staging, under Triton's interpreter (on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.pages.op import PageRows
from moeserve.kernels.pages.reference import gather_pages, page_bytes, scatter_pages

SLOTS, PAGE_SLOTS = 40, 4


@pytest.mark.parametrize("sizes", [(64, 64, 8192, 12), (6, 64)], ids=["words of 4 bytes", "of 2"])
def test_it_moves_what_the_reference_moves(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (SLOTS, size), dtype=torch.uint8, generator=generator) for size in sizes]
    slots = torch.randperm(SLOTS, generator=generator)[: 3 * PAGE_SLOTS]
    expected = torch.zeros(3, page_bytes(rows, PAGE_SLOTS), dtype=torch.uint8)
    gather_pages(rows, slots, expected)

    here = [tensor.to(DEVICE) for tensor in rows]
    moving = PageRows(here, PAGE_SLOTS)
    pages = torch.zeros(4, expected.shape[1], dtype=torch.uint8, device=DEVICE)
    moving.gather(slots.to(DEVICE), pages[:3])
    assert torch.equal(pages[:3].cpu(), expected)
    assert not pages[3].any()

    others = torch.randperm(SLOTS, generator=generator)[: 3 * PAGE_SLOTS]
    scatter_pages(rows, others, expected)
    moving.scatter(others.to(DEVICE), pages[:3])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(here, rows, strict=True))
