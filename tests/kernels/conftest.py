"""For every kernel test: Triton's interpreter where there is no GPU, torch as in the worker."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
from tests.support.torch_settings import gradients_for_the_next

__all__ = ["gradients_for_the_next"]
