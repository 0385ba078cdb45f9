"""The devices have the sampling parameters that are declared, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.kernels.sampling import columns, reference
from moeserve.kernels.sampling.cpu import SamplerState
from moeserve.kernels.sampling.op import DeviceSamplerState
from moeserve.sampling.parameters import DEFAULTS, PARAMETERS, settings_of

OF_THE_STATE = (
    *("seed", "dry", "dry_room", "order", "num_bias", "num_stop", "min_tokens", "num_output", "history_row"),
)
CPP = {"float": "float32", "double": "float64", "int32_t": "int32"}


def test_the_cpu_has_the_declared_settings() -> None:
    found = {name: (CPP[kind], default) for name, (kind, default) in SamplerState.settings().items()}
    assert found == {name: (of.column, getattr(DEFAULTS, name)) for name, of in PARAMETERS.items()}


def test_the_specification_has_the_declared_settings() -> None:
    plain = reference.Params()
    assert {name: getattr(plain, name) for name in PARAMETERS} == settings_of(DEFAULTS)


def test_a_gpus_row_has_every_column_in_a_place_of_its_own() -> None:
    values = {name: i + 1 for i, name in enumerate((*PARAMETERS, *OF_THE_STATE))}
    row = columns.row(**values)
    assert len(row) == columns.WORDS.value
    for name, value in values.items():
        kind = np.dtype(
            PARAMETERS[name].column
            if name in PARAMETERS
            else "uint64"
            if name in ("seed", "dry")
            else "int32"
        )
        at = columns.column(name).value
        assert at % (kind.itemsize // 4) == 0
        assert row[at : at + kind.itemsize // 4].view(kind) == value, name


def test_a_setting_that_is_not_declared_is_refused() -> None:
    with pytest.raises(TypeError, match="there is no setting xtc_chance"):
        DeviceSamplerState(1, 64, "cpu").bind(0, xtc_chance=0.5)
