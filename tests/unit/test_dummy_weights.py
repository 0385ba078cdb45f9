"""--load-format dummy: random weights of a file's shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from moeserve.errors import ConfigError
from moeserve.models.gguf import GGUFError, open_gguf
from moeserve.models.gguf import names as n
from moeserve.models.gguf.dummy import open_dummy, std_of
from moeserve.models.registry import read_checked_shape
from moeserve.worker.loading import load_cpu_runner
from tests.gpu.driver import Driver, small_config


@pytest.fixture
def header_only(tiny_model: Path, tmp_path: Path) -> Path:
    """The packaged model without its tensors' bytes."""
    file = open_gguf(tiny_model)
    start = min(tensor.offset for tensor in file.tensors.values())
    path = tmp_path / "header.gguf"
    path.write_bytes(tiny_model.read_bytes()[:start])
    return path


def test_a_file_that_ends_before_its_tensors(header_only: Path, tiny_model: Path) -> None:
    with pytest.raises(GGUFError, match="truncated"):
        open_gguf(header_only)
    dummy, real = open_dummy(header_only), open_gguf(tiny_model)
    assert dummy.tensors == real.tensors
    read_checked_shape(dummy)
    for name, tensor in dummy.tensors.items():
        assert len(dummy.data(name)) == tensor.nbytes


def test_matrices_are_random_and_vectors_ones(header_only: Path) -> None:
    dummy = open_dummy(header_only)
    for name, tensor in dummy.tensors.items():
        block = tensor.type.block_bytes
        data = dummy.data(name).copy()
        stored = data.view(np.float32) if block == 4 else data.reshape(-1, block)
        values = quants.dequantize(stored, GGMLQuantizationType(int(tensor.type)))
        if len(tensor.shape) == 1:
            assert (values == 1).all()
        else:
            assert 0.8 < values.std() / std_of(tensor) < 1.25, name
            assert abs(values.mean()) < 0.2 * std_of(tensor), name
    gate, up = (dummy.data(n.of_layer(0, part)).copy() for part in (n.FFN_GATE_EXPS, n.FFN_UP_EXPS))
    assert not np.array_equal(gate, up)
    assert np.array_equal(gate, dummy.data(n.of_layer(0, n.FFN_GATE_EXPS)))  # the same at every start


def test_the_engine_runs_on_them(header_only: Path) -> None:
    config = small_config(header_only, load_format="dummy", threads=1)
    driver = Driver(load_cpu_runner(config, lambda *_: None))
    tokens = driver.generate(0, [1, 2, 3], 4)
    assert len(tokens) == 4
    assert min(tokens) >= 0


def test_not_in_place(tiny_model: Path) -> None:
    config = small_config(tiny_model, load_format="dummy", weight_layout="file", threads=1)
    with pytest.raises(ConfigError, match="--weight-layout"):
        load_cpu_runner(config, lambda *_: None)
