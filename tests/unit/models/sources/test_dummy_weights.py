"""--load-format dummy: random weights of a file's shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import GGUFError, open_gguf
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.dummy import open_dummy, std_of
from tests.conftest import OWN_FIXTURES
from tests.support.models.header_only import write_header_only


@pytest.fixture
def header_only(tiny_model: Path, tmp_path: Path) -> Path:
    return write_header_only(tiny_model, tmp_path / "header.gguf")


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


@pytest.mark.parametrize("name", ["nemotronhmoe-f16", "kimilinear-f16", "qwen3next-q4_k_m"])
def test_recurrent_states_decay(name: str) -> None:
    """With a rate above 0 a state grows with every token, and a benchmark computes with infinities."""
    file = open_dummy(OWN_FIXTURES / f"tiny-{name}.gguf")
    rates = [tensor for tensor in file.tensors.values() if tensor.name.endswith("ssm_a")]
    assert rates
    for tensor in rates:
        assert (file.data(tensor.name).view(np.float32) == -1.0).all()
