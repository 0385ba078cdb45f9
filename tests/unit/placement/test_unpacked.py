"""Experts that a GPU holds a second time, as 16-bit floats: which layers' they are, and what KV loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeserve.cli.command_line import read_options
from moeserve.config import ServerConfig
from moeserve.config.units import MIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.placement import ModelSizes, PlacementOptions, place
from moeserve.placement.options import placement_options, with_unpacked_beside_kv
from moeserve.placement.unpacked import check_unpacked
from tests.conftest import TINY_MODEL
from tests.support.models.model_header import qwen3moe
from tests.support.router.placement_world import gpu, model

OF_LAYER = 32 * MIB


def sizes(unpacked: tuple[int, ...] = (OF_LAYER,) * 4) -> ModelSizes:
    whole = model()
    layers = [replace(layer, unpacked=size) for layer, size in zip(whole.layers, unpacked, strict=True)]
    return replace(whole, layers=tuple(layers))


def test_the_first_layers_that_fit_and_less_kv() -> None:
    plain = place(sizes(), PlacementOptions(), gpu(1000))
    some = place(sizes(), PlacementOptions(unpacked_experts=3 * OF_LAYER - 1), gpu(1000))
    assert (plain.unpacked_layers, plain.unpacked_bytes) == ((), 0)
    assert (some.unpacked_layers, some.unpacked_bytes) == ((0, 1), 2 * OF_LAYER)
    assert some.gpu_weight_bytes == plain.gpu_weight_bytes
    assert plain.kv_bytes is not None
    assert some.kv_bytes is not None
    assert some.kv_bytes == plain.kv_bytes - 3 * OF_LAYER + 1


def test_more_than_all_layers_need_is_left_to_kv() -> None:
    plain = place(sizes(), PlacementOptions(), gpu(1000))
    every = place(sizes(), PlacementOptions(unpacked_experts=500 * MIB), gpu(1000))
    assert every.unpacked_layers == (0, 1, 2, 3)
    assert plain.kv_bytes is not None
    assert every.kv_bytes == plain.kv_bytes - 4 * OF_LAYER


def test_layers_with_float_experts_or_experts_in_ram_have_none() -> None:
    of_floats = sizes((0, OF_LAYER, OF_LAYER, OF_LAYER))
    assert place(of_floats, PlacementOptions(unpacked_experts=500 * MIB), gpu(1000)).unpacked_layers == (
        1,
        2,
        3,
    )
    heat = [[9] * 8, [9] * 8, [1] * 8, [1] * 8]
    tight = PlacementOptions(unpacked_experts=2 * OF_LAYER, counts=heat, most_kv_tokens=64)
    whole = place(sizes(), PlacementOptions(most_kv_tokens=64), gpu(1000))
    room = (whole.gpu_weight_bytes + (whole.kv_bytes or 0)) // MIB + 2 * OF_LAYER // MIB + 100
    some = next(
        placed
        for mib in range(room, 0, -1)
        if (placed := place(sizes(), tight, gpu(mib))).layers[-1].num_cpu_experts
    )
    assert all(not some.layers[index].num_cpu_experts for index in some.unpacked_layers)
    assert 3 not in some.unpacked_layers


def test_automatic_ones_take_up_to_half_of_what_kv_has() -> None:
    plain = place(sizes(), PlacementOptions(), gpu(1000))
    auto = place(sizes(), PlacementOptions(kv_tokens_beside_unpacked=4096), gpu(1000))
    assert plain.kv_bytes is not None
    assert auto.kv_bytes is not None
    assert auto.unpacked_layers == (0, 1, 2, 3)
    assert auto.kv_bytes == plain.kv_bytes - 4 * OF_LAYER
    larger = place(sizes((3 * 64 * MIB,) * 4), PlacementOptions(kv_tokens_beside_unpacked=4096), gpu(1000))
    assert larger.unpacked_layers == (0, 1)
    assert larger.kv_bytes is not None
    assert plain.kv_bytes // 2 <= larger.kv_bytes == plain.kv_bytes - 2 * 3 * 64 * MIB


def test_automatic_ones_leave_kv_its_tokens() -> None:
    per_token = sum(layer.kv for layer in sizes().layers)
    plain = place(sizes(), PlacementOptions(), gpu(1000))
    assert plain.kv_tokens is not None
    one_layer = plain.kv_tokens - OF_LAYER // per_token
    for tokens, layers in ((one_layer, (0,)), (one_layer + 1, ()), (1 << 40, ())):
        auto = place(sizes(), PlacementOptions(kv_tokens_beside_unpacked=tokens), gpu(1000))
        assert auto.unpacked_layers == layers
        assert auto.kv_tokens is not None
        assert auto.kv_tokens >= min(tokens, plain.kv_tokens)


@pytest.mark.parametrize("most", [{"max_total_tokens": 1024}, {"most_kv_tokens": 1024}])
def test_automatic_ones_take_what_kv_cannot_use(most: dict[str, Any]) -> None:
    """More than half of the memory, and KV keeps all that it may have."""
    plain = place(sizes(), PlacementOptions(**most), gpu(300))
    auto = place(sizes(), PlacementOptions(kv_tokens_beside_unpacked=1 << 40, **most), gpu(300))
    assert auto.unpacked_layers == (0, 1, 2, 3)
    assert auto.kv_tokens == plain.kv_tokens == 1024


@pytest.mark.parametrize("mib", [80, 100, 120, 140])
def test_no_automatic_ones_where_experts_are_in_ram(mib: int) -> None:
    """And the placement is the one without them."""
    small = sizes((MIB,) * 4)
    plain = place(small, PlacementOptions(), gpu(mib))
    assert any(layer.num_cpu_experts for layer in plain.layers)
    assert place(small, PlacementOptions(kv_tokens_beside_unpacked=64), gpu(mib)) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            PlacementOptions(unpacked_experts=OF_LAYER - 1),
            "the experts of one layer take 0.03 GiB as 16-bit floats",
        ),
        (
            PlacementOptions(unpacked_experts=OF_LAYER, num_gpu_experts=4),
            "no layer has all its experts, quantised, on",
        ),
        (
            PlacementOptions(unpacked_experts=120 * MIB, gpu_memory_budget=130 * MIB),
            "0.12 for unpacked experts",
        ),
    ],
)
def test_what_cannot_be_met_is_an_error(options: PlacementOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(sizes(), options, gpu(1000))


def test_the_cpu_engine_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"^--unpacked-experts: there is nothing to place"):
        place(sizes(), PlacementOptions(unpacked_experts=OF_LAYER), None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"unpacked_experts": "1.5"}, (3 << 29, None)),
        ({"unpacked_experts": "auto"}, (None, 64 * 8192)),
        ({"max_num_seqs": "3", "max_model_len": "500"}, (None, 1500)),
        ({}, (None, 64 * 8192)),
        ({"unpacked_experts": "0"}, (None, None)),
    ],
)
def test_the_flag(flags: dict[str, str], expected: tuple[int | None, int | None]) -> None:
    config, shape = read_options({"model": "m", **flags}, {}), qwen3moe(context_length=16384)
    options = with_unpacked_beside_kv(placement_options(config, shape), config, shape, 513)
    assert (options.unpacked_experts, options.kv_tokens_beside_unpacked) == expected


def test_steps_of_512_tokens_get_no_automatic_ones() -> None:
    config, shape = ServerConfig(model="m"), qwen3moe(context_length=8192)
    options = placement_options(config, shape)
    assert with_unpacked_beside_kv(options, config, shape, 512) is options


@pytest.mark.parametrize("text", ["all", "AUTO", "54GiB", ""])
def test_other_words_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--unpacked-experts: must "):
        read_options({"model": "m", "unpacked_experts": text}, {})


def test_steps_that_would_not_use_them() -> None:
    config = ServerConfig(model="m", unpacked_experts=1.0)
    with pytest.raises(
        ConfigError, match=r"^--unpacked-experts: .* --max-num-batched-tokens is 512; leave it"
    ):
        check_unpacked(config, 512)
    check_unpacked(config, 513)
    check_unpacked(replace(config, unpacked_experts="auto"), 512)
    check_unpacked(replace(config, unpacked_experts=0.0), 512)


def test_the_bytes_of_a_layer() -> None:
    """Gate, up and down of 16 bits each."""
    source = open_dummy_model(TINY_MODEL)
    shape = read_shape(source)
    moe = shape.layers[0].moe
    assert moe is not None
    layer = ModelSizes.of(source.tensors, KvLayout(shape)).layers[0]
    assert layer.unpacked == 2 * 3 * moe.num_experts * moe.width * shape.hidden_size
