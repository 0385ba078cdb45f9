"""Norm, rotation and the way into the KV pool against float64; the angles against Hugging Face's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.kernels.rope.reference import rope_store, rotate
from moeserve.models.blocks.rope import rope_tables
from moeserve.models.interface import ModelShape
from moeserve.models.registry import read_shape
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import open_gguf
from tests.kernels.attention.rope_step import Step
from tests.kernels.operations import ISAS, run_rope_store, stream_of
from tests.kernels.weights import activations

each_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> ModelShape:
    return read_shape(open_gguf(tiny_model))


@each_isa
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_against_float64(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    step = Step(9, heads, kv_heads, dim)
    q = step.run(isa)
    keys, values = (pool.double().clone() for pool in (step.kv.keys, step.kv.values))
    expected = rope_store(*step.qkv, *step.norms, 1e-6, *step.tables, step.slots, keys, values)
    torch.testing.assert_close(q.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(step.kv.keys.double(), keys, rtol=2**-11 + 1e-6, atol=1e-6)
    written = step.slots.long()
    assert torch.equal(step.kv.values[written], step.qkv[2].half())
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[written] = False
    assert (step.kv.keys[untouched] == 7).all()
    assert (step.kv.values[untouched] == 7).all()


@each_isa
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(6, 2, 128, 64), (4, 4, 96, 32), (2, 1, 64, 64)]
)
@pytest.mark.parametrize(
    ("q_norm", "k_norm"), [(None, None), ("full", "full"), ("head", None), (None, "full")]
)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_variants_against_float64(
    isa: str, heads: int, kv_heads: int, dim: int, rotary: int, q_norm: str, k_norm: str, scale: float | None
) -> None:
    """Norms of each head, over all heads, or none; rotation of a head's first part; another scale."""
    step = Step(9, heads, kv_heads, dim, rotary)
    sizes = {"head": (dim, dim), "full": (heads * dim, kv_heads * dim)}
    step.norms = (
        None if q_norm is None else torch.randn(sizes[q_norm][0]),
        None if k_norm is None else torch.randn(sizes[k_norm][1]),
    )
    q = step.run(isa, scale=scale)
    keys, values = (pool.double().clone() for pool in (step.kv.keys, step.kv.values))
    arguments = (*step.qkv, *step.norms, 1e-6, *step.tables, step.slots)
    expected = rope_store(*arguments, keys, values, scale=scale)
    torch.testing.assert_close(q.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(step.kv.keys.double(), keys, rtol=2**-11 + 1e-6, atol=1e-6)
    assert torch.equal(step.kv.values[step.slots.long()], step.qkv[2].half())


@each_isa
def test_variants_in_any_batch_and_on_any_threads(isa: str) -> None:
    step = Step(33, 6, 2, 128, 64)
    step.norms = torch.randn(6 * 128), torch.randn(2 * 128)
    whole, keys = step.run(isa, 1), step.kv.keys.clone()
    for n, threads in ((1, 2), (7, 3), (33, 3)):
        step.kv.keys.zero_()
        q, k, v = (t[:n].contiguous() for t in step.qkv)
        tables = (step.tables[0][:n], step.tables[1][:n])
        stream, slots = stream_of(isa, threads), step.slots[:n]
        assert torch.equal(
            run_rope_store(stream, (q, k, v), step.norms, 1e-6, tables, slots, step.kv), whole[:n]
        )
        assert torch.equal(step.kv.keys[slots.long()], keys[slots.long()])


@each_isa
def test_positions_say_whose_angles_a_row_has(isa: str) -> None:
    step = Step(9, 4, 2, 64)
    q, keys = step.run(isa), step.kv.keys.clone()
    step.kv.keys.fill_(7.0)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    of_all = tuple(torch.cat([torch.full((1, 32), 7.0), table[order]]) for table in step.tables)
    positions = 1 + torch.argsort(order).int()
    found = run_rope_store(
        stream_of(isa), step.qkv, step.norms, 1e-6, of_all, step.slots, step.kv, positions=positions
    )
    assert torch.equal(found, q)
    assert torch.equal(step.kv.keys, keys)


@each_isa
def test_float16_rounds_to_nearest_even_at_every_size(isa: str) -> None:
    """Subnormal, just below and above the largest, ties, infinite."""
    step = Step(1, 1, 1, 64)
    midway = torch.arange(1, 9) * 2.0**-10 + 1 + 2.0**-11
    small = torch.tensor(
        [2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.0**-25 * 1.001, 2.0**-14, 2.0**-14 * 0.9999, 1e-30]
    )
    large = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, float("inf"), 2049.0, 2051.0])
    values = torch.cat([midway, small, large, torch.zeros(10)])
    step.qkv[2][0, 0] = torch.cat([values, -values])
    step.run(isa)
    assert torch.equal(step.kv.values[step.slots.long()][0, 0], step.qkv[2][0, 0].half())


@each_isa
def test_batch_and_threads_do_not_change_a_bit(isa: str) -> None:
    whole, part = Step(65, 4, 2, 128), Step(65, 4, 2, 128)
    q = whole.run(isa, 1)
    for n in (*range(1, 10), 64):
        part.qkv = tuple(t[:n] for t in whole.qkv)  # type: ignore[assignment]
        assert torch.equal(part.run(isa, 3), q[:n])
    written = whole.slots[:64].long()
    assert torch.equal(part.kv.keys[written], whole.kv.keys[written])
    assert torch.equal(part.kv.values[written], whole.kv.values[written])


# ---------------------------------------------------------------- angles

SCALINGS = {
    "none": (RopeScaling(), {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    # What Qwen3 documents for 131,072 tokens.
    "yarn": (
        RopeScaling("yarn", 4.0, 32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn with other limits": (
        RopeScaling("yarn", 10.0, 4096, attn_factor=0.5, beta_fast=16.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 10.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.5 * 1.2302585092994046,  # 0.1 ln 10 + 1
        },
    ),
    "yarn of a context so short that the ramp starts at 0": (
        RopeScaling("yarn", 2.0, 64),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_hugging_faces(config: ModelShape, name: str, theta: float) -> None:
    """Frequencies to float32's precision, theirs; the magnitude exactly. llama.cpp defines both in the same way."""
    ours, theirs = SCALINGS[name]
    cos, sin = rope_tables(dataclasses.replace(config, rope_scaling=ours, rope_theta=theta), 2)
    frequencies, magnitude = hugging_face_frequencies({**theirs, "rope_theta": theta}, config.head_dim)
    got = torch.atan2(sin[1].double(), cos[1].double())  # position 1: the angle is the frequency, at most 1
    torch.testing.assert_close(got, frequencies.double(), rtol=1e-6, atol=1e-8)
    assert cos[0].tolist() == pytest.approx([magnitude] * len(cos[0]), rel=1e-7)
    assert not sin[0].any()


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_divides_by_the_list_for_the_longest_context(config: ModelShape, length: int) -> None:
    """As transformers does for a text of that length."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"short_factor": [1.0 + 0.01 * i for i in range(64)], "long_factor": [1.0 + i for i in range(64)]}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **lists}
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    theirs = Phi3Config(**sizes, rope_parameters=parameters)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
    shape = dataclasses.replace(
        config, rope_theta=1e4, rope_scaling=RopeScaling("longrope", 1.0, 64, attn_factor=magnitude)
    )
    form = dataclasses.replace(config.heads.form, has_rope_factors=True)
    cos, sin = rope_tables(shape, length, form, torch.tensor(list(lists.values())))
    got = torch.atan2(sin[1].double(), cos[1].double())
    torch.testing.assert_close(got, frequencies.double(), rtol=1e-6, atol=1e-8)
    assert cos[0].tolist() == pytest.approx([magnitude] * 64, rel=1e-7)


def hugging_face_frequencies(parameters: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    config = Qwen3MoeConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    if parameters["rope_type"] == "default":
        return Qwen3MoeRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)


def test_far_positions_keep_their_angle(config: ModelShape) -> None:
    """float32 positions times float32 frequencies would be off by 0.01 at position 200,000; ours are float64."""
    cos, sin = rope_tables(config, 200_001)
    angle = 200_000 * 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
    torch.testing.assert_close(cos[-1], angle.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[-1], angle.sin().float(), rtol=0, atol=1e-7)


def test_the_rotation_is_hugging_faces(config: ModelShape) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

    cos, sin = rope_tables(config, 40)
    heads = activations("gaussian", 40 * 3, 128).view(40, 3, 128)
    doubled = [torch.cat([t, t], dim=-1)[None] for t in (cos, sin)]
    theirs, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], *doubled)
    torch.testing.assert_close(rotate(heads, cos, sin).float(), theirs[0].transpose(0, 1), rtol=0, atol=2e-6)
