"""Drafts that a GPU computes, and those it refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.placement.gpu_drafts import check_gpu_drafts

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("model", "method", "refused"),
    [
        ("tiny-qwen3moe-q4_k_m", "ngram", None),
        ("tiny-qwen3moe-q4_k_m", "auto", None),
        ("tiny-qwen3moe-q4_k_m", "mtp", "the model's own block drafts on the CPU alone"),
        ("tiny-qwen3next-q4_k_m", "ngram", "models with recurrent state"),
    ],
)
def test_what_a_gpu_computes(model: str, method: str, refused: str | None) -> None:
    path = FIXTURES / f"{model}.gguf"
    config = ServerConfig(
        model=str(path), speculative_config=f'{{"method": "{method}", "num_speculative_tokens": 3}}'
    )
    shape = read_checked_shape(open_metadata(path))
    if refused is None:
        check_gpu_drafts(config, shape)
        return
    with pytest.raises(ConfigError, match=refused):
        check_gpu_drafts(config, shape)


def test_a_small_model_drafts_on_the_cpu_alone() -> None:
    path = FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"
    config = ServerConfig(model=str(path), speculative_model=str(path))
    with pytest.raises(ConfigError, match="a small model drafts on the CPU alone"):
        check_gpu_drafts(config, read_checked_shape(open_metadata(path)))
