"""Triton's interpreter where there is no GPU: set up before any of these tests imports triton."""

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)
