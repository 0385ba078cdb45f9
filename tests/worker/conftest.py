"""For the tests of the worker: torch on one thread, as in the worker itself."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
import torch

torch.set_num_threads(1)
