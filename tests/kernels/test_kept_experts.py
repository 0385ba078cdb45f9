"""Which blocks of routes experts take that are kept unpacked on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.models.blocks.gpu.expert_run import ExpertRun
from moeserve.models.loading.gpu_weights import GpuExperts
from tests.kernels.plane_tensors import planes_of
from tests.kernels.weights import Type

PLAIN = BlockWorkspace(16, 2, 4, DEVICE)
UNPACKED = BlockWorkspace(16, 2, 4, DEVICE, unpacked_block=128)
KEPT = BlockWorkspace(16, 2, 4, DEVICE, unpacked_block=128)
SHARED = BlockWorkspace(16, 1, 1, DEVICE)


def run(blocks: BlockWorkspace, *, kept: bool) -> Any:
    planes, floats = planes_of(Type.Q4_K, 1, 16, 256), torch.zeros(1)
    experts = GpuExperts(planes, planes, planes, unpacked=(floats, floats) if kept else None)
    rest: dict[str, Any] = dict.fromkeys(field for field in ExpertRun._fields if field != "gathered")
    return ExpertRun(**(rest | {"experts": experts, "blocks": blocks}))


@pytest.mark.parametrize(
    ("blocks", "of_step", "kept", "expected"),
    [
        (PLAIN, PLAIN, True, KEPT),
        (UNPACKED, UNPACKED, True, UNPACKED),
        (PLAIN, PLAIN, False, None),
        (SHARED, PLAIN, True, None),
    ],
    ids=["a smaller step", "a step that unpacks", "not kept", "a shared expert"],
)
def test_blocks(
    blocks: BlockWorkspace, of_step: BlockWorkspace, kept: bool, expected: BlockWorkspace | None
) -> None:
    step: Any = SimpleNamespace(blocks=of_step, kept_blocks=KEPT, unpacked=object())
    assert run(blocks, kept=kept)._kept_blocks(step) is expected
    step.unpacked = None  # no memory for the numbers of the first and last expert
    assert run(blocks, kept=kept)._kept_blocks(step) is None
