"""Drafts that a GPU computes, and those it refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.attention import AttentionShape
from moeserve.models.gpu_features import gpu_drafting_shape
from moeserve.models.interface import LayerShape
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.models.residual import SinkhornConnections
from moeserve.placement import ModelSizes
from moeserve.placement.gpu_drafts import check_drafts_placed, check_gpu_drafts
from moeserve.placement.placement import LayerPlacement, Placement
from moeserve.worker.loading.draft_model import DraftModel, open_draft_model, small_step_tokens

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("tiny-qwen3moe-q4_k_m", "ngram"),
        ("tiny-qwen3moe-q4_k_m", "auto"),
        ("tiny-qwen3next-q4_k_m", "ngram"),
        ("tiny-nemotronhmoe-f16", "ngram"),
        ("tiny-falconh1-f16", "ngram"),
        ("tiny-lfm2moe-f16", "ngram"),
    ],
)
def test_what_a_gpu_computes(model: str, method: str) -> None:
    path = FIXTURES / f"{model}.gguf"
    config = ServerConfig(
        model=str(path), speculative_config=f'{{"method": "{method}", "num_speculative_tokens": 3}}'
    )
    check_gpu_drafts(config, read_checked_shape(open_metadata(path)))


def small_model(name: str, **options: object) -> tuple[ServerConfig, DraftModel]:
    """The small model beside tiny-qwen2moe, whose vocabulary it has, on a GPU."""
    path = FIXTURES / "tiny-qwen2moe-q4_k_m.gguf"
    config = ServerConfig(model=str(path), speculative_model=str(FIXTURES / name), **options)  # type: ignore[arg-type]
    source = open_metadata(path)
    small = open_draft_model(config, source, read_checked_shape(source), has_tensors=False, on_gpu=True)
    assert small is not None
    return config, small


def test_a_small_model_with_states_drafts_on_the_cpu_alone() -> None:
    with pytest.raises(ConfigError, match=r"small model with recurrent layers .* on the CPU alone"):
        small_model("tiny-qwen3next-q4_k_m.gguf")


def test_a_small_model_has_room_on_the_gpu() -> None:
    """Its weights, and buffers for steps of 512 rows, however many the large model's have."""
    config, small = small_model("tiny-qwen2moe-q4_k_m.gguf", max_model_len=512, max_num_seqs=4)
    model = small.shape
    weights = ModelSizes.of(small.source.tensors, small.layout).gpu_bytes
    few, more, most = (small.gpu_bytes(config, model, rows, on_cuda=False) for rows in (16, 512, 8192))
    assert weights < few < more == most
    assert small_step_tokens(config, 8192) == 512
    assert small_step_tokens(ServerConfig(model="", max_num_seqs=600), 8192) == 600


def test_where_a_head_drafts() -> None:
    """An EAGLE-3 head reads the residual before layers that attend, all of them and the embedding on the GPU."""
    path = FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"
    shape = read_checked_shape(open_metadata(path))
    whole = Placement("cuda", (LayerPlacement("cuda", 8, tuple(range(8))),) * shape.num_layers, "cuda", 0, 0)
    taps = (1, shape.num_layers)
    check_drafts_placed(shape, whole, taps)
    with pytest.raises(
        ConfigError, match=r"an EAGLE-3 head can draft only if all layers and .* say --n-gpu-layers 3"
    ):
        check_drafts_placed(shape, replace(whole, embedding="cpu"), taps)
    check_drafts_placed(shape, whole, (), has_small_model=True)
    with pytest.raises(ConfigError, match="a small model can draft only if all layers"):
        check_drafts_placed(shape, replace(whole, embedding="cpu"), (), has_small_model=True)
    layers = list(shape.layers)
    layers[1] = replace(layers[1], mixer=None)
    with pytest.raises(ConfigError, match="reads the residual before layer 1, which does not attend"):
        check_drafts_placed(replace(shape, layers=tuple(layers)), whole, taps)


def _windowed(layer: LayerShape) -> LayerShape:
    assert isinstance(layer.mixer, AttentionShape)
    return replace(layer, mixer=replace(layer.mixer, window=8))


@pytest.mark.parametrize(
    ("change", "streams", "what"),
    [
        (_windowed, None, "windowed attention"),  # Step-3.5's
        (
            lambda layer: replace(layer, is_parallel=True),
            None,
            "attention and feed-forward beside each other",
        ),
        (lambda layer: layer, SinkhornConnections(4, 3, 1e-6), "a model whose residual has several streams"),
    ],
)
def test_a_block_that_drafts_on_the_cpu_alone(
    change: Callable[[LayerShape], LayerShape], streams: SinkhornConnections | None, what: str
) -> None:
    """`auto` goes on with look-up alone, which needs no block."""
    path = FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"
    shape = replace(read_checked_shape(open_metadata(path)), streams=streams)
    drafting = replace(shape, next_token_layer=change(shape.layers[-1]))
    assert gpu_drafting_shape(drafting, "auto") == shape
    config = ServerConfig(
        model=str(path), speculative_config='{"method": "mtp", "num_speculative_tokens": 3}'
    )
    with pytest.raises(ConfigError, match=f"block with {what} drafts on the CPU alone"):
        check_gpu_drafts(config, gpu_drafting_shape(drafting, "mtp"))
