"""A key that changes the computation of some architecture is heeded or refused in each family's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.neutral_settings import NEUTRAL, OF_WINDOWS, SHARED
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.sources.gguf import Metadata, open_gguf
from tests.conftest import OWN_FIXTURES, TINY_MODEL

# One file of each architecture: their keys differ, not their types of weights.
FILES = sorted(
    {open_gguf(path).architecture: path for path in sorted(OWN_FIXTURES.glob("tiny-*.gguf"))}.items()
)
# What changes nothing of a shape whatever it is: a shared expert's size, which families read from one of the two
# keys and find in the tensors; a limit and a start that are stated by layers; and what several keys state.
STATED_TWICE = SHARED | {"full_attention_interval", "leading_dense_block_count"}


def shape_with(path: Path, **changes: Any) -> ModelShape:
    """Reads the file as if it had these values under `<architecture>.<key>`, with "__" for "."."""
    file = open_gguf(path)
    values = {f"{file.architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    file.metadata = Metadata(path, dict(file.metadata) | values)
    return read_checked_shape(file)


def values_of(neutral: tuple[float | bool | str, ...]) -> tuple[float | bool | str, ...]:
    """Returns values of the same type, at least one of which changes the computation."""
    if neutral and isinstance(neutral[0], bool):
        return True, False
    return ("relu",) if not neutral or isinstance(neutral[0], str) else (3,)


def is_overlooked(path: Path, plain: ModelShape, key: str) -> bool:
    """Returns whether the file is read as before whatever the key says."""
    for value in values_of(NEUTRAL[key]):
        try:
            if shape_with(path, **{key.replace(".", "__"): value}) != plain:
                return False
        except ModelError:
            return False
    return True


@pytest.mark.parametrize(("architecture", "path"), FILES, ids=[name for name, _ in FILES])
def test_no_file_has_a_setting_that_is_overlooked(architecture: str, path: Path) -> None:
    file = open_gguf(path)
    plain = read_shape(file)
    keys = [key for key in NEUTRAL.keys() - STATED_TWICE if f"{architecture}.{key}" not in file.metadata]
    overlooked = [key for key in keys if is_overlooked(path, plain, key)]
    assert not overlooked


@pytest.mark.parametrize("suffix", OF_WINDOWS)
def test_layers_with_windows_that_differ_where_the_family_knows_none(suffix: str) -> None:
    of_windows, of_all = (key.replace(".", "__") for key in (suffix, OF_WINDOWS[suffix]))
    value = 1e6 if "freq_base" in suffix else 128
    windows = {"attention__sliding_window": 64, "attention__sliding_window_pattern": 3}
    shape_with(TINY_MODEL, **windows, **{of_windows: value, of_all: value})
    shape_with(TINY_MODEL, **{of_windows: 96, of_all: value})  # no layer has a window
    with pytest.raises(ModelError, match=suffix):
        shape_with(TINY_MODEL, **windows, **{of_windows: 96, of_all: value})


def test_a_window_that_no_layer_has() -> None:
    no_layers = np.array([False] * 3)
    shape_with(TINY_MODEL, attention__sliding_window=64, attention__sliding_window_pattern=no_layers)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor' is 2.0; with rope.scaling.type 'none'"),
        ({"rope__scaling__yarn_attn_factor": 2.0}, "yarn_attn_factor' is 2.0"),
        ({"rope__scaling__yarn_ext_factor": 1.0}, "yarn_ext_factor' is 1.0"),
        (
            {"rope__scale_linear": 2.0, "rope__scaling__attn_factor": 2.0},
            "attn_factor' is 2.0; with rope.scaling.type 'linear'",
        ),
        (
            {"attention__sliding_window": 4},
            "sliding_window' is 4; this architecture is supported only without",
        ),
        ({"attention__recurrent_layers": np.array([False, True, False])}, "says True of layer 1"),
    ],
    ids=str,
)
def test_settings_that_contradict_the_others(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        shape_with(TINY_MODEL, **changes)


def test_settings_that_agree_with_the_others_or_change_nothing() -> None:
    plain = shape_with(TINY_MODEL)
    assert plain == shape_with(
        TINY_MODEL,
        attention__sliding_window=4096,  # the context is shorter
        attention__recurrent_layers=np.array([False] * 3),
        rope__scaling__attn_factor=1.0,
        rope__scaling__yarn_ext_factor=-1.0,
        rope__scaling__yarn_beta_fast=32.0,
        hidden_activation="silu",
        expert_gating_func=1,
    )


def test_a_file_that_states_longrope_twice() -> None:
    path = OWN_FIXTURES / "tiny-phi4mini-f16.gguf"
    with pytest.raises(ModelError, match=r"rope\.scaling\.factor' is given, and the file has the tensor"):
        shape_with(path, rope__scaling__factor=4.0)
