"""Files with gate and up in one tensor: read as the two that other files have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from moeserve.models.sources.gguf import GGUFError, open_gguf
from moeserve.models.sources.gguf.dummy import open_dummy
from tests.support.models.gguf_bytes import Tensor, gguf_bytes

Q8_0 = gguf.GGMLQuantizationType.Q8_0
WEIGHT = Tensor("blk.1.ffn_gate_up_exps.weight", (64, 6, 3), Q8_0)  # 3 experts of 3 + 3 rows
BIAS = Tensor("blk.1.ffn_gate_up_exps.bias", (6, 3))


def written(path: Path, *tensors: Tensor) -> Path:
    path.write_bytes(gguf_bytes({}, list(tensors)))
    return path


def test_gates_rows_come_first_in_each_expert(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", Tensor("a", (32,)), WEIGHT, BIAS)
    file = open_gguf(path)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for suffix, shape in (("weight", (3, 3, 64)), ("bias", (3, 3))):
        whole = stored[f"blk.1.ffn_gate_up_exps.{suffix}"]
        for part, rows in (("gate", slice(0, 3)), ("up", slice(3, 6))):
            name = f"blk.1.ffn_{part}_exps.{suffix}"
            assert file.tensors[name].shape == shape
            expected = np.ascontiguousarray(whole[:, rows]).reshape(-1).view(np.uint8)
            np.testing.assert_array_equal(file.data(name), expected)
            assert len(expected) == file.tensors[name].nbytes
            file.advise_done(name)
    assert "blk.1.ffn_gate_up_exps.weight" not in file.tensors
    assert not file.is_mapped
    assert open_dummy(path).data("blk.1.ffn_up_exps.weight").shape == (3 * 3 * 68,)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("blk.1.ffn_gate_up_exps.weight", (64, 5, 3), Q8_0),
        Tensor("blk.1.ffn_gate_up_exps.weight", (64,)),
        Tensor("blk.x.ffn_gate_up_exps.weight", (64, 6, 3), Q8_0),
        Tensor("ffn_gate_up_exps.weight", (64, 6, 3), Q8_0),
    ],
    ids=["odd rows", "a vector", "no layer's number", "no layer"],
)
def test_what_cannot_be_halved_stays_what_it_is(tmp_path: Path, tensor: Tensor) -> None:
    file = open_gguf(written(tmp_path / "m.gguf", tensor))
    assert list(file.tensors) == [tensor.name]
    assert file.is_mapped


def test_a_tensor_and_a_half_of_the_same_name_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", Tensor("blk.1.ffn_up_exps.weight", (64, 3, 3), Q8_0), WEIGHT)
    with pytest.raises(GGUFError, match=r"'blk\.1\.ffn_up_exps\.weight' occurs twice"):
        open_gguf(path)
