"""Which blocks of routes unpacked experts take on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.kernels.linear.large_batch import UnpackScratch
from moeserve.models.blocks.gpu.expert_run import ExpertRun
from moeserve.models.blocks.gpu.workspace import make_workspaces
from moeserve.models.loading.gpu_weights import GpuExperts
from tests.kernels.quantization.plane_tensors import planes_of
from tests.kernels.weights import Type
from tests.support.models.model_header import qwen3moe

PLAIN = BlockWorkspace(16, 2, 4, DEVICE)
UNPACKED = (
    BlockWorkspace(16, 2, 4, DEVICE, large_batch_block=128),
    UnpackScratch(torch.empty(0, device=DEVICE)),
)
SHARED = BlockWorkspace(16, 1, 1, DEVICE)


def run(blocks: BlockWorkspace, *, unpacked: bool) -> Any:
    planes, floats = planes_of(Type.Q4_K, 1, 16, 256), torch.zeros(1)
    experts = GpuExperts(planes, planes, planes, unpacked=(floats, floats) if unpacked else None)
    rest: dict[str, Any] = dict.fromkeys(field for field in ExpertRun._fields if field != "gathered")
    return ExpertRun(**(rest | {"experts": experts, "blocks": blocks}))


@pytest.mark.parametrize(
    ("blocks", "unpacked", "expected"),
    [(PLAIN, True, UNPACKED), (PLAIN, False, None), (SHARED, True, None)],
    ids=["unpacked", "not unpacked", "a shared expert"],
)
def test_blocks(blocks: BlockWorkspace, unpacked: bool, expected: object) -> None:
    step: Any = SimpleNamespace(blocks=PLAIN, unpacked_experts=UNPACKED)
    assert run(blocks, unpacked=unpacked)._unpacked_experts(step) is expected
    step.unpacked_experts = None  # a small step
    assert run(blocks, unpacked=unpacked)._unpacked_experts(step) is None


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (512, 10), (128, 1)])
def test_all_steps_of_more_than_512_rows_use_them(experts: int, top_k: int) -> None:
    """Those too whose experts have too few routes to be unpacked in the step, and those with attention of floats."""
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    shape = qwen3moe(**sizes, num_experts=experts, top_k=top_k, expert_width=96, vocab_size=300)
    for float_weights in (False, True):
        meta = torch.device("meta")
        spaces = make_workspaces(shape, 16384, torch.float32, meta, float_weights=float_weights)
        assert [rows for rows, space in spaces.items() if space.unpacked_experts] == [
            1024,
            2048,
            4096,
            8192,
            16384,
        ]
        unpacked = [space.unpacked_experts for space in spaces.values() if space.unpacked_experts]
        assert all(blocks.is_large_batch for blocks, _ in unpacked)
