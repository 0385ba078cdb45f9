"""Bytes of a token's KV, and which types --kv-cache-dtype has for which models."""

from __future__ import annotations

import dataclasses

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.layout import FLOAT16, Q8_0, check_cpu_reads, layout_of
from moeserve.models.attention import AttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from tests.support.models.model_header import QWEN3_30B_A3B

LATENT = LatentAttentionShape(32, 0, 512, 128, 64, 128, 0.07)


def with_mixer(mixer: AttentionShape | LatentAttentionShape) -> ModelShape:
    layers = tuple(dataclasses.replace(layer, mixer=mixer) for layer in QWEN3_30B_A3B.layers)
    return dataclasses.replace(QWEN3_30B_A3B, layers=layers)


def attention_of(shape: ModelShape) -> AttentionShape:
    mixer = shape.layers[0].mixer
    assert isinstance(mixer, AttentionShape)
    return mixer


@pytest.mark.parametrize("name", ["auto", "f16"])
def test_16_bits_are_what_auto_is(name: str) -> None:
    layout = layout_of(ServerConfig(kv_cache_dtype=name), QWEN3_30B_A3B)
    assert layout.dtype == FLOAT16
    assert layout.token_bytes() == 48 * 2 * 4 * 128 * 2


def test_q8_0_takes_little_more_than_half() -> None:
    layout = layout_of(ServerConfig(kv_cache_dtype="q8_0"), QWEN3_30B_A3B)
    assert layout.dtype == Q8_0
    assert layout.token_bytes() == 48 * 2 * 4 * (128 + 4 * 2)
    assert layout.token_bytes() <= 0.54 * layout_of(ServerConfig(), QWEN3_30B_A3B).token_bytes()


def test_fp8_takes_a_little_less_than_q8_0() -> None:
    layout = layout_of(ServerConfig(kv_cache_dtype="fp8"), QWEN3_30B_A3B)
    assert layout.token_bytes() == 48 * 2 * 4 * (128 + 2)
    uneven = with_mixer(dataclasses.replace(attention_of(QWEN3_30B_A3B), head_dim=80))
    with pytest.raises(ConfigError, match="fp8: needs heads of a multiple of 32 numbers"):
        layout_of(ServerConfig(kv_cache_dtype="fp8"), uneven)
    assert layout_of(ServerConfig(kv_cache_dtype="bf16"), uneven).token_bytes() == 48 * 2 * 4 * 80 * 2


@pytest.mark.parametrize(("name", "instead"), [("bf16", "f16"), ("fp8", "q8_0")])
def test_what_the_cpu_does_not_read_is_refused_there(name: str, instead: str) -> None:
    layout = layout_of(ServerConfig(kv_cache_dtype=name), QWEN3_30B_A3B)
    with pytest.raises(
        ConfigError, match=f"--kv-cache-dtype {name}: only a GPU's attention .* say {instead} "
    ):
        check_cpu_reads(layout)
    for other in ("auto", "f16", "q8_0"):
        check_cpu_reads(layout_of(ServerConfig(kv_cache_dtype=other), QWEN3_30B_A3B))


def test_capped_scores_are_computed_of_16_bits_on_the_cpu() -> None:
    shape = with_mixer(dataclasses.replace(attention_of(QWEN3_30B_A3B), score_cap=50.0))
    check_cpu_reads(layout_of(ServerConfig(), shape))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype q8_0: this model caps .* say f16"):
        check_cpu_reads(layout_of(ServerConfig(kv_cache_dtype="q8_0"), shape))


@pytest.mark.parametrize("name", ["q8_0", "fp8", "bf16"])
def test_latent_attention_has_float16_alone(name: str) -> None:
    shape = with_mixer(LATENT)
    assert layout_of(ServerConfig(kv_cache_dtype="f16"), shape).dtype == FLOAT16
    with pytest.raises(ConfigError, match=rf"{name}: not for qwen3moe, whose attention \(MLA\) .* say f16"):
        layout_of(ServerConfig(kv_cache_dtype=name), shape)


def test_heads_that_blocks_do_not_fill_have_no_q8_0() -> None:
    shape = with_mixer(dataclasses.replace(attention_of(QWEN3_30B_A3B), head_dim=80))
    with pytest.raises(
        ConfigError, match="q8_0: needs heads of a multiple of 32 numbers, this model's have 80"
    ):
        layout_of(ServerConfig(kv_cache_dtype="q8_0"), shape)
