"""config.json of Gemma 3 as it is published: most settings are transformers' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.models.errors import ModelError
from moeserve.models.registry import family_of_config
from moeserve.models.sources.huggingface.config_json import metadata_of

# Of the model with 4B parameters.
TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def metadata(text: dict[str, Any]) -> dict[str, Any]:
    path = Path("config.json")
    family, settings = family_of_config(path, {"model_type": "gemma3", "text_config": text})
    assert family.hugging_face is not None
    found = metadata_of(path, settings, family.architecture, family.hugging_face)
    return {name.removeprefix("gemma3."): value for name, value in found.items()}


def test_the_published_form() -> None:
    found = metadata(TEXT)
    heads = [found[f"attention.{name}"] for name in ("head_count", "head_count_kv", "key_length")]
    assert heads == [8, 4, 256]
    assert found["attention.scale"] == 1 / 16
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (1e6, 1e4)
    assert (found["rope.scaling.type"], found["rope.scaling.factor"]) == ("linear", 8.0)
    assert np.flatnonzero(~found["attention.sliding_window_pattern"]).tolist() == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(
    "change",
    [
        {"use_bidirectional_attention": True},
        {"final_logit_softcapping": 30.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"hidden_activation": "silu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="supported"):
        metadata(TEXT | change)
