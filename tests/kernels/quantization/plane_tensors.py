"""Quantised matrices as planes, for tests of GPU kernels."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.planes import Planes, repack
from moeserve.quantization import QUANT_TYPES
from tests.kernels import weights
from tests.kernels.quantization.plane_bytes import bytes_of
from tests.kernels.weights import random_weights

GUARD = 12345.0


def planes_of(kind: weights.Type, *shape: int) -> Planes:
    return repack(bytes_of(random_weights(kind, *shape)).to(DEVICE), QUANT_TYPES[kind], shape)


def tensors(p: Planes) -> list[torch.Tensor]:
    return [p.codes, p.scales, p.supers]
