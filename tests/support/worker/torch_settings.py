"""torch as in the worker: on one thread, so that its threads and the pool's do not compete."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def gradients_for_the_next() -> Iterator[None]:
    """Loading a runner turns gradients off in its process, the tests' too; training needs them."""
    yield
    torch.set_grad_enabled(True)
