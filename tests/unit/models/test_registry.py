"""The table of architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.registry import FAMILIES, read_shape
from moeserve.models.sources.gguf import open_gguf
from tests.support.models.gguf_bytes import Tensor, gguf_bytes


def test_each_architecture_has_its_own_family() -> None:
    assert [family.architecture for family in FAMILIES.values()] == list(FAMILIES)
    assert "qwen3moe" in FAMILIES
    assert "grok" not in FAMILIES


@pytest.mark.parametrize(
    ("metadata", "advice"),
    [
        ({"general.architecture": "clip", "general.type": "mmproj"}, "name this file with --mmproj"),
        ({"general.architecture": "clip"}, "name this file with --mmproj"),  # before the key existed
        ({"general.architecture": "qwen3moe", "general.type": "adapter"}, "--lora-modules NAME=FILE"),
        ({"general.type": "imatrix"}, "serve a model"),
    ],
)
def test_a_file_that_is_a_part_of_a_model_is_named(
    tmp_path: Path, metadata: dict[str, str], advice: str
) -> None:
    file = tmp_path / "part.gguf"
    file.write_bytes(gguf_bytes(metadata, [Tensor("t", (8, 4))]))
    with pytest.raises(ModelError, match="this is an? .*" + advice):
        read_shape(open_gguf(file))
