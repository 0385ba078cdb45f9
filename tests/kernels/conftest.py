"""For every kernel test: torch on one thread, as in the worker, so that its threads and the pool's do not compete."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _gradients_for_the_next() -> Iterator[None]:
    """Loading a runner turns gradients off in its process, the tests' too; training needs them."""
    yield
    torch.set_grad_enabled(True)
