"""config.json as models of this autumn are published, with fewer layers (tests/fixtures/README.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.registry import family_of_config
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import StringArray
from moeserve.models.sources.huggingface.config_json import metadata_of
from moeserve.models.sources.source import ModelSource
from tests.conftest import OWN_FIXTURES

CONFIGS: Final[dict[str, dict[str, Any]]] = json.loads((OWN_FIXTURES / "published_configs.json").read_text())
REFUSED: Final = {
    "MiniMax-M3-MXFP8": "has a quantization_config of 'mxfp8', which is not read",
}
PATH: Final = Path("config.json")


class Vocabulary(StringArray):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        return iter([b""] * self.size)


def complain(path: Path, key: str, problem: str) -> ModelError:
    return ModelError(path, f"{key} {problem}")


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a model whose files have the tensors that families ask for."""
    family, settings = family_of_config(PATH, config)
    assert family.hugging_face is not None
    values = metadata_of(PATH, settings, family.architecture, family.hugging_face)
    values["tokenizer.ggml.tokens"] = Vocabulary(settings["vocab_size"])
    dense = cast(int, values.get(f"{family.architecture}.leading_dense_block_count", 0))
    tensors = {n.of_layer(layer, n.FFN_GATE) for layer in range(dense)}
    tensors |= {n.of_layer(layer, n.FFN_ROUTED_NORM) for layer in range(128)}
    source = SimpleNamespace(
        path=PATH,
        architecture=family.architecture,
        metadata=Metadata(PATH, values, complain),
        tensors=dict.fromkeys(tensors),
    )
    return family.read_shape(cast(ModelSource, source))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_as_it_is_published(name: str) -> None:
    config = CONFIGS[name]
    text = config.get("text_config", config)
    assert len(shape_of(config).layers) == text["num_hidden_layers"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        family_of_config(PATH, CONFIGS[name])


def test_solar_opens_heads_rotate_as_a_whole() -> None:
    mixer = shape_of(CONFIGS["Solar-Open-100B"]).layers[0].mixer
    assert isinstance(mixer, AttentionShape)
    assert mixer.rotary_dim == 128
    without = {
        name: value for name, value in CONFIGS["Solar-Open-100B"].items() if name != "partial_rotary_factor"
    }
    assert shape_of(without) == shape_of(CONFIGS["Solar-Open-100B"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; only 1.0"),
        (
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' is 0.5",
        ),
        ({"first_k_dense_replace": 1}, "'first_k_dense_replace' is 1; only 0"),
        ({"use_qk_norm": True}, "'use_qk_norm' is True; only False"),
    ],
    ids=str,
)
def test_another_solar_open_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        family_of_config(PATH, CONFIGS["Solar-Open-100B"] | changes)


def test_mimos_epsilon_has_either_name() -> None:
    config = CONFIGS["MiMo-V2-Flash (published)"]
    assert shape_of(config | {"layernorm_epsilon": 1e-6}).rms_eps == 1e-6
    with pytest.raises(ModelError, match="'rms_norm_eps' is 1e-06 and 'layernorm_epsilon' 1e-05"):
        shape_of(config | {"rms_norm_eps": 1e-6})


@pytest.mark.parametrize("also", [False, True], ids=["quantization", "quantization_config too"])
def test_mlxs_weights_are_refused_by_name(also: bool) -> None:
    mlx = {"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}
    config = CONFIGS["Qwen3.6-35B-A3B"] | mlx | ({"quantization_config": mlx["quantization"]} if also else {})
    with pytest.raises(ModelError, match="has a quantization_config of MLX, in"):
        family_of_config(PATH, config)
