"""Experts that a GPU holds a second time, as 16-bit floats: which layers' they are, and what KV loses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeserve.config import ServerConfig
from moeserve.config.units import MIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.placement import ModelSizes, PlacementOptions, place
from moeserve.placement.unpacked import check_unpacked
from tests.conftest import TINY_MODEL
from tests.support.placement_world import gpu, model

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


def test_steps_that_would_not_use_them() -> None:
    config = ServerConfig(model="m", unpacked_experts=1.0)
    with pytest.raises(
        ConfigError, match=r"^--unpacked-experts: .* --max-num-batched-tokens is 512; leave it"
    ):
        check_unpacked(config, 512)
    check_unpacked(config, 513)
    check_unpacked(replace(config, unpacked_experts=None), 512)


def test_the_bytes_of_a_layer() -> None:
    """Gate, up and down of 16 bits each."""
    source = open_dummy_model(TINY_MODEL)
    shape = read_shape(source)
    moe = shape.layers[0].moe
    assert moe is not None
    layer = ModelSizes.of(source.tensors, KvLayout(shape)).layers[0]
    assert layer.unpacked == 2 * 3 * moe.num_experts * moe.width * shape.hidden_size
