"""Settings that config.json has twice: they must agree, because versions of transformers differ in which they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.open import open_model
from tests.fuzz.folder_mutations import base_files

PLAIN = {"rope_type": "default", "rope_theta": 1e6}


def open_with(folder: Path, **changes: Any) -> None:
    """Opens a folder without weights up to the check of its configuration."""
    files = base_files()
    files["config.json"] |= {"rope_parameters": PLAIN} | changes
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    open_model(folder)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_local_experts": 7}, r"'num_experts' is \d+ and 'num_local_experts' 7: they do not agree"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'rope_scaling' is .*: they do not agree"),
    ],
    ids=["experts", "scaling"],
)
def test_names_of_one_setting_that_differ(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        open_with(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": base_files()["config.json"]["num_experts"]},
        {"rope_theta": 1e6},
        {"num_local_experts": None, "rope_theta": None},
        {"rope_scaling": PLAIN},
    ],
    ids=["experts", "base", "null", "scaling"],
)
def test_names_of_one_setting_that_agree(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        open_with(tmp_path, **changes)
    assert "safetensors" in str(caught.value), "only the weights are missing"
