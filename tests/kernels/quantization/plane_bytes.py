"""Random quantised bytes of a matrix."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels import weights


def bytes_of(w: weights.Weights) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(w.rows))
