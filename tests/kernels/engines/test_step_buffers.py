"""What the engines allocate for a step is what `models/step_buffers.py` declares, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels import launch
from moeserve.kernels.planes import empty_planes
from moeserve.kernels.stream_operands import Activations
from moeserve.models.blocks.cpu.workspace import (
    DeltaWorkspace,
    LatentExpertWorkspace,
    LatentWorkspace,
    Mamba2Workspace,
    ShortConvWorkspace,
)
from moeserve.models.blocks.gpu.workspace import make_workspaces
from moeserve.models.buffers import Buffer, arena_bytes
from moeserve.models.cpu_step_buffers import cpu_step_buffers
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.open import open_model
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.registry import read_shape
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.step_buffers import gpu_arena_bytes, gpu_step_buffers, step_sizes
from moeserve.quantization.table import Q4_K, Q5_K, Q6_K
from tests.conftest import OWN_FIXTURES
from tests.support.models.deepseek4_model import new_model, write_model
from tests.support.models.gemma_file import write_gemma
from tests.support.models.model_header import qwen3moe

SHAPE = qwen3moe(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=4, top_k=2,
                 expert_width=96, vocab_size=300)  # fmt: skip


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 16, 17, 300])
def test_a_gpus_workspaces_lie_within_the_arena_that_was_planned(
    max_tokens: int, float_weights: bool
) -> None:
    assert_planned(SHAPE, max_tokens, float_weights=float_weights)


def test_the_workspaces_of_layers_whose_heads_differ(tmp_path: Path) -> None:
    shape = read_shape(open_model(write_gemma(tmp_path / "gemma.gguf", Type.F16)))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=True)
    space = make_workspaces(shape, 16, torch.float32, torch.device("cpu"), float_weights=True)[16]
    of_form = [space.forms[form] for form in shape.forms]
    assert [tuple(each.q.shape) for each in of_form] == [(16, 2, 32), (16, 2, 64)]
    assert [each.attended.x.shape[1] for each in of_form if each.attended.x is not None] == [64, 128]
    assert of_form[0].q.data_ptr() == of_form[1].q.data_ptr() == space.q.data_ptr()


def test_the_workspaces_of_kimi_delta_attention() -> None:
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-kimilinear-f16.gguf"))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=False)
    assert shape.recurrence is not None
    space = DeltaWorkspace(shape.recurrence, 16, Activations(16, shape.mixed_width))
    own = [*space.inputs, *space.gates, *(x for pair in space.low_rank for x in (pair.f32, pair.q8))]
    names = ("delta", "ssm_f_b", "ssm_g_b")
    planned = [buffer for buffer in cpu_step_buffers(shape, 16) if buffer.name.startswith(names)]
    assert sum(x.nbytes for x in own) == sum(buffer.nbytes for buffer in planned)


def test_the_workspaces_of_gates_with_one_matrix_each() -> None:
    """As in Ling 3: of Kimi Delta Attention's decays and outputs, and of latent attention's heads."""
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-kimilinear-f16.gguf"))
    layers = (
        replace(layer, mixer=replace(layer.mixer, gate_rank=0))
        if isinstance(layer.mixer, GatedDeltaNetShape)
        else replace(layer, mixer=replace(layer.mixer, gate="head"))
        for layer in shape.layers
        if isinstance(layer.mixer, GatedDeltaNetShape | LatentAttentionShape)
    )
    shape = replace(shape, layers=tuple(layers))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=False)
    assert isinstance(shape.recurrence, GatedDeltaNetShape)
    assert shape.latent is not None
    delta = DeltaWorkspace(shape.recurrence, 16, Activations(16, shape.mixed_width))
    latent = LatentWorkspace(shape.latent, 16)
    assert latent.gate is not None
    planned = {buffer.name: buffer.nbytes for buffer in cpu_step_buffers(shape, 16)}
    assert sum(x.nbytes for x in [*delta.inputs, *delta.gates]) == planned["delta"]
    assert latent.gate.nbytes == planned["latent_gate"] > 0


def test_the_workspaces_of_mamba_2() -> None:
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-nemotronhmoe-f16.gguf"))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=False)
    assert isinstance(shape.recurrence, Mamba2Shape)
    space = Mamba2Workspace(shape.recurrence, 16, Activations(16, shape.mixed_width))
    planned = [buffer for buffer in cpu_step_buffers(shape, 16) if buffer.name in ("mamba2", "decays")]
    assert space.projected.nbytes + space.decays.nbytes == sum(buffer.nbytes for buffer in planned)


def test_the_workspace_of_short_convolutions() -> None:
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-lfm2moe-f16.gguf"))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=False)
    assert isinstance(shape.recurrence, ShortConvShape)
    space = ShortConvWorkspace(shape.recurrence, 16, Activations(16, shape.mixed_width))
    planned = [buffer for buffer in cpu_step_buffers(shape, 16) if buffer.name == "short_conv"]
    assert space.projected.nbytes == sum(buffer.nbytes for buffer in planned)


def test_the_workspaces_of_compressed_attention_and_mixed_streams(tmp_path: Path) -> None:
    shape = read_shape(open_model(write_model(new_model(8), tmp_path / "m.gguf", Type.F16)))
    for max_tokens in (16, 300):
        assert_planned(shape, max_tokens, float_weights=False)
    space = make_workspaces(shape, 16, torch.float32, torch.device("cpu"), float_weights=False)[16]
    assert space.projected.dtype == torch.float32
    assert space.compressed is not None
    assert space.compressed.choice is not None
    assert space.compressed.choice.chosen.shape == (16, 1, 9)


def test_the_workspace_of_latent_experts() -> None:
    shape = read_shape(open_model(OWN_FIXTURES / "tiny-nemotronhlatent-f16.gguf"))
    space = LatentExpertWorkspace(32, 16)
    own = (space.product, space.converted.f32, space.converted.q8)
    planned = [buffer for buffer in cpu_step_buffers(shape, 16) if buffer.name.startswith("latent_")]
    assert sum(x.nbytes for x in own) == sum(buffer.nbytes for buffer in planned)


def assert_planned(shape: ModelShape, max_tokens: int, *, float_weights: bool) -> None:
    planned = gpu_arena_bytes(shape, max_tokens, "float32", float_weights=float_weights)
    spaces = make_workspaces(
        shape, max_tokens, torch.float32, torch.device("cpu"), float_weights=float_weights
    )
    assert list(spaces) == step_sizes(max_tokens)
    storages = {
        space.x.untyped_storage().data_ptr(): space.x.untyped_storage().nbytes() for space in spaces.values()
    }
    assert list(storages.values()) == [planned]  # one arena for all sizes
    largest = gpu_step_buffers(shape, step_sizes(max_tokens)[-1], "float32", float_weights=float_weights)
    assert len({buffer.name for buffer in largest}) == len(largest)
    assert arena_bytes(largest) == planned


def test_steps_of_some_rows_unpack_attention_alone() -> None:
    for float_weights in (False, True):
        spaces = make_workspaces(SHAPE, 128, torch.float32, torch.device("cpu"), float_weights=float_weights)
        assert spaces[64].unpack_scratch is None
        scratch = spaces[128].unpack_scratch
        assert (scratch is None) == float_weights
        if scratch is not None:
            assert scratch.fits(SHAPE.q_rows + 2 * SHAPE.kv_width, SHAPE.hidden_size)
        assert not spaces[128].blocks.is_large_batch


def test_codebooks_are_unpacked_where_larger_steps_have_the_memory() -> None:
    spaces = make_workspaces(SHAPE, 4096, torch.float32, torch.device("cpu"), float_weights=False)
    some = {rows for rows, space in spaces.items() if space.books is not None}
    assert some == {16, 32, 64, 128, 256, 512, 1024}
    assert spaces[4096].blocks.is_large_batch
    alone = make_workspaces(SHAPE, 16, torch.float32, torch.device("cpu"), float_weights=False)
    assert alone[16].books is None


def test_more_experts_are_unpacked_at_once_where_larger_steps_have_the_memory() -> None:
    spaces = make_workspaces(SHAPE, 8192, torch.float32, torch.device("cpu"), float_weights=False)
    alone = make_workspaces(SHAPE, 4096, torch.float32, torch.device("cpu"), float_weights=False)
    room, least = spaces[4096].unpack_scratch, alone[4096].unpack_scratch
    assert room is not None
    assert least is not None
    assert room.floats.numel() > 2 * least.floats.numel()
    arena = spaces[8192].x.untyped_storage()
    assert room.floats.data_ptr() + room.floats.nbytes <= arena.data_ptr() + arena.nbytes()
    distances = (x.data_ptr() + x.nbytes for x in vars(spaces[4096]).values() if isinstance(x, torch.Tensor))
    assert max(distances) <= room.floats.data_ptr()


def test_buffers_do_not_overlap() -> None:
    space = make_workspaces(SHAPE, 512, torch.float32, torch.device("cpu"), float_weights=False)[32]
    tensors = [value for value in vars(space).values() if isinstance(value, torch.Tensor)]
    assert space.books is not None
    tensors.append(space.books[1].floats)
    distinct = {tensor.data_ptr(): tensor for tensor in tensors}
    ends = sorted((start, start + tensor.nbytes) for start, tensor in distinct.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_buffer_knows_its_bytes() -> None:
    assert Buffer("x", (3, 5), "float16").nbytes == torch.empty(3, 5, dtype=torch.float16).nbytes
    assert arena_bytes([Buffer("a", (1,)), Buffer("b", (65,))]) == 256 + 512


def test_blocks_of_routes_are_for_the_experts_that_are_here() -> None:
    """Every block has programs, those of experts elsewhere too."""
    rows, block = 512, 32
    few, all_of_them = (
        make_workspaces(
            SHAPE, rows, torch.float32, torch.device("cpu"), float_weights=False, experts_here=experts
        )[rows].blocks
        for experts in (2, None)
    )
    assert few.routes.shape == (2 + rows * SHAPE.top_k // block, block)
    assert len(all_of_them.expert) - len(few.expert) == SHAPE.num_experts - 2


def test_experts_of_six_bits_take_integers_up_to_256_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WARPGROUPS", True)
    make = partial(
        make_workspaces, SHAPE, floats=torch.bfloat16, device=torch.device("cpu"), float_weights=False
    )
    taken = {
        kind: [
            rows
            for rows in (16, 256, 512, 1024)
            if (w := make(max_tokens=rows)[rows].integers) is not None
            and w.takes_down(empty_planes(kind, (1, 64, 256), "meta"))
        ]
        for kind in (Q4_K, Q6_K, Q5_K)
    }
    assert taken == {Q4_K: [16, 256, 512, 1024], Q6_K: [16, 256], Q5_K: []}


@pytest.mark.parametrize(("hidden", "width", "columns"), [(5120, 64, 5120), (64, 4352, 4352), (4096, 64, 0)])
def test_few_rows_have_integers_only_for_wide_matrices(hidden: int, width: int, columns: int) -> None:
    (layer,) = SHAPE.layers
    shape = replace(SHAPE, hidden_size=hidden, layers=(replace(layer, ffn=DenseFfnShape(width)),))
    for rows in (1, 2, 4, 8):
        buffers = {b.name: b for b in gpu_step_buffers(shape, rows, "bfloat16", float_weights=False)}
        assert ("integer_y" in buffers) == (columns > 0 and rows > 2), rows
        if "integer_y" in buffers:
            assert buffers["integer_y"].shape == (rows, columns)
    floats = gpu_step_buffers(shape, 4, "bfloat16", float_weights=True)
    assert all(buffer.name != "integer_y" for buffer in floats)
