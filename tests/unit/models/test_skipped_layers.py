"""What is known of layers for further tokens (MTP) in a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.cli.main import main
from moeserve.cli.plan import command
from moeserve.models.registry import read_checked_shape
from moeserve.models.skipped_layers import SkippedLayers, skipped_layers
from moeserve.models.sources.gguf import open_gguf
from tests.support.models.gguf_bytes import Tensor, gguf_bytes, model_metadata, model_tensors
from tests.support.router.plan_command import RATES

HEAD = Tensor("blk.2.nextn.eh_proj.weight", (64, 32))
NORM = Tensor("blk.2.nextn.enorm.weight", (32,))


def write(folder: Path, *further: Tensor) -> Path:
    """Two layers that are run, and a third of these tensors, which metadata announces."""
    metadata = model_metadata(block_count=3, nextn_predict_layers=1)
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, [*model_tensors(), *further]))
    return path


def test_their_bytes_are_the_files(tmp_path: Path) -> None:
    source = open_gguf(write(tmp_path, HEAD, NORM))
    shape = read_checked_shape(source)
    assert shape.num_layers == 2
    assert skipped_layers(shape, source) == SkippedLayers(1, num_bytes=HEAD.nbytes + NORM.nbytes)


def test_a_file_without_them_has_none(tmp_path: Path) -> None:
    source = open_gguf(write(tmp_path))
    assert skipped_layers(read_checked_shape(source), source) == SkippedLayers(0, 0)


def test_the_plan_tells_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_cpu", lambda *_: RATES)
    found = []
    for further in ((), (HEAD, NORM)):
        flags = ["plan", "--model", str(write(tmp_path, *further)), "--device", "cpu"]
        assert main([*flags, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    without, shown = found
    assert shown["skipped_layers"] == {"count": 1, "num_bytes": HEAD.nbytes + NORM.nbytes}
    assert shown["file_bytes"] - without["file_bytes"] == HEAD.nbytes + NORM.nbytes
    assert shown["memory"] == without["memory"]
    assert shown["tensors"][HEAD.name] == "not loaded"
    assert main(flags) == 0
    assert ", 1 for further tokens (MTP) not loaded (0.00 GiB)" in capsys.readouterr().out
