"""What the engines allocate for a step is what `models/step_buffers.py` declares, to the byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.header import qwen3moe
from moeserve.models.blocks.gpu.workspace import make_workspaces
from moeserve.models.step_buffers import Buffer, arena_bytes, gpu_arena_bytes, gpu_step_buffers, step_sizes

SHAPE = qwen3moe(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=4, top_k=2,
                 expert_width=96, vocab_size=300)  # fmt: skip


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 16, 17, 300])
def test_a_gpus_workspaces_lie_within_the_arena_that_was_planned(
    max_tokens: int, float_weights: bool
) -> None:
    planned = gpu_arena_bytes(SHAPE, max_tokens, "float32", float_weights=float_weights)
    spaces = make_workspaces(
        SHAPE, max_tokens, torch.float32, torch.device("cpu"), float_weights=float_weights
    )
    assert list(spaces) == step_sizes(max_tokens)
    storages = {
        space.x.untyped_storage().data_ptr(): space.x.untyped_storage().nbytes() for space in spaces.values()
    }
    assert list(storages.values()) == [planned]  # one arena for all sizes
    largest = gpu_step_buffers(SHAPE, step_sizes(max_tokens)[-1], "float32", float_weights=float_weights)
    assert len({buffer.name for buffer in largest}) == len(largest)
    assert arena_bytes(largest) == planned


def test_buffers_do_not_overlap() -> None:
    space = make_workspaces(SHAPE, 32, torch.float32, torch.device("cpu"), float_weights=False)[32]
    tensors = [value for value in vars(space).values() if isinstance(value, torch.Tensor)]
    distinct = {tensor.data_ptr(): tensor for tensor in tensors}
    ends = sorted((start, start + tensor.nbytes) for start, tensor in distinct.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_buffer_knows_its_bytes() -> None:
    assert Buffer("x", (3, 5), "float16").nbytes == torch.empty(3, 5, dtype=torch.float16).nbytes
    assert arena_bytes([Buffer("a", (1,)), Buffer("b", (65,))]) == 256 + 512
