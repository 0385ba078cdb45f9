"""What of the folder of --lora-dir becomes an adapter: files that lie there, however links lead to them, of a size that
an adapter of the model can have."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.open import open_adapter
from moeserve.models.adapters.peft_config import CONFIG_FILE
from moeserve.models.adapters.products import most_tensors, products_of
from moeserve.models.adapters.read_peft import WEIGHTS_FILE
from moeserve.models.interface import ModelShape
from tests.support.models.gguf_adapters import write as write_gguf
from tests.support.models.peft_files import GATE, GOOD, PREFIX, SHAPE, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = Path(os.path.realpath(tmp_path)) / "adapters"
    found.mkdir()
    return found


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_that_leads_out_is_refused_whether_anything_is_there(
    name: str, is_there: bool, folder: Path
) -> None:
    path = write(folder / "x")
    outside = folder.parent / "secret"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    if not is_there:
        outside.unlink()
    with pytest.raises(AdapterError, match=f"{name}: .*--lora-dir"):
        open_adapter("x", path, SHAPE, folder)


def test_a_link_within_and_one_of_the_operators_own_are_followed(folder: Path) -> None:
    """As the hub's cache has them: a snapshot's files are links to blobs."""
    path, blob = write(folder / "snapshot"), folder / "blob"
    (path / WEIGHTS_FILE).rename(blob)
    (path / WEIGHTS_FILE).symlink_to("../blob")
    assert open_adapter("x", path, SHAPE, folder).nbytes
    assert open_adapter("x", path, SHAPE).nbytes
    elsewhere = folder.parent / "blob"
    blob.rename(elsewhere)
    (path / WEIGHTS_FILE).unlink()
    (path / WEIGHTS_FILE).symlink_to(elsewhere)
    assert open_adapter("x", path, SHAPE).nbytes, "one of --lora-modules may lie anywhere"


def test_a_part_of_a_split_file_that_leads_out_is_refused(folder: Path) -> None:
    first = write_gguf(folder / "x-00001-of-00002.gguf")
    second = first.with_name("x-00002-of-00002.gguf")
    outside = write_gguf(folder.parent / "outside.gguf")
    second.symlink_to(outside)
    with pytest.raises(AdapterError, match=r"x-00002-of-00002\.gguf: .*--lora-dir"):
        open_adapter("x", first, SHAPE, folder)


def test_how_many_tensors_an_adapter_may_have() -> None:
    of_layer = sum(product.experts for product in products_of(SHAPE, 0).values())
    assert most_tensors(SHAPE) == 2 * SHAPE.num_layers * of_layer
    assert of_layer > 3 * GATE.experts


@pytest.mark.parametrize("entries", [20_000])
def test_a_header_with_more_than_an_adapter_has_is_not_even_read(entries: int, folder: Path) -> None:
    """To read it takes the time of answers that are computed meanwhile."""
    path = write(folder / "x")
    header = {
        f"{PREFIX}{number}.lora_A.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for number in range(entries)
    }
    text = json.dumps(header).encode()
    (path / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text)
    with (
        patch("moeserve.models.sources.huggingface.safetensors_file.safe_open") as reads,
        pytest.raises(AdapterError, match=rf"has a header of {len(text)} bytes; \d+ at most are expected"),
    ):
        open_adapter("x", path, SHAPE, folder)
    assert not reads.called


def test_a_configuration_of_many_megabytes_is_not_read(folder: Path) -> None:
    path = write(folder / "x", revision="x" * (5 << 20))
    with pytest.raises(AdapterError, match=rf"{CONFIG_FILE}: has \d+ bytes; 4194304 at most are supported"):
        open_adapter("x", path, SHAPE, folder)


def test_the_largest_adapter_of_a_model_is_read(folder: Path) -> None:
    """With the longest names that PEFT gives."""
    tensors: dict[str, npt.NDArray[Any]] = dict(GOOD)
    for expert in range(GATE.experts):
        for layer in range(SHAPE.num_layers):
            tensors |= _experts(SHAPE, layer, expert)
    path = write(folder / "x", tensors)
    with (path / WEIGHTS_FILE).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    assert length / len(tensors) < 300, "beside what is allowed for a tensor"
    assert open_adapter("x", path, SHAPE, folder).nbytes


def _experts(shape: ModelShape, layer: int, expert: int) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for name, part in (("gate", "gate"), ("up", "gate"), ("down", "down")):
        product = products_of(shape, layer)[f"ffn_{part}_exps"]
        for matrix, form in (("A", (2, product.cols)), ("B", (product.rows, 2))):
            key = (
                f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj.lora_{matrix}.weight"
            )
            found[key] = np.zeros(form, np.float32)
    return found
