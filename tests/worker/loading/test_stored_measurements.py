"""What is kept on disk of a GPU's steps, and what is measured again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import moeserve.kernels
from moeserve.messages.steps import MeasuredStep
from moeserve.worker.engines.gpu.measure import stored
from moeserve.worker.engines.gpu.measure.calibration import Calibration
from moeserve.worker.engines.gpu.measure.stored import StoredMeasurements, step_key
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

STEPS = [MeasuredStep(4, 10, 0, 0, 1.5), MeasuredStep(0, 0, 8192, 512, 20.25)]


def test_the_next_worker_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "moeserve-steps"
    assert StoredMeasurements(folder, "key").read() is None
    StoredMeasurements(folder, "key").write(STEPS, None)
    found = StoredMeasurements(folder, "key").read()
    assert found is not None
    assert found.steps == STEPS
    assert found.calibration is None
    assert StoredMeasurements(folder, "other").read() is None
    assert [path.name for path in folder.iterdir()] == ["key.json"]


@pytest.mark.parametrize("threshold", [None, 96])
def test_which_part_is_streamed_is_kept_too(tmp_path: Path, threshold: int | None) -> None:
    calibration = Calibration(threshold, Streaming(((64, 0.25), (128, 1.0))))
    StoredMeasurements(tmp_path, "key").write([], calibration)
    found = StoredMeasurements(tmp_path, "key").read()
    assert found is not None
    assert found.calibration == calibration


def test_that_nothing_is_streamed_is_no_missing_calibration(tmp_path: Path) -> None:
    StoredMeasurements(tmp_path, "key").write([], Calibration(None, Streaming()))
    found = StoredMeasurements(tmp_path, "key").read()
    assert found is not None
    assert found.calibration == Calibration(None, Streaming())


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"{", b'{"steps": [[1, 2]]}', b'{"steps": "many"}'),
        # Of the right types, and nothing that a worker has measured.
        *(b'{"steps": [[-1, 0, 0, 8, 1.0]]}', b'{"steps": [[0, 0, 0, 0, 1.0]]}', b'{"steps": [[1, 1, 0, 0, 0.0]]}'),
        *(b'{"steps": [[1, 1, 0, 0, 1e300]]}', b'{"steps": [[1, 1, 0, 4611686018427387904, 1.0]]}'),
        *(b'{"steps": [[0, 1, 0, 8, 1.0]]}', b'{"steps": [], "streamed": [[64, 1.5]]}'),
        *(b'{"steps": [], "streamed": [[64, 0.5], [64, 1.0]]}', b'{"steps": [], "streamed": [[-1, 0.5]]}'),
        b'{"steps": [], "streamed": [[64, 1.0]], "threshold": -5}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key.json").write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert StoredMeasurements(tmp_path, "key").read() is None
    assert "is measured anew" in caplog.text
    StoredMeasurements(tmp_path, "key").write(STEPS, None)
    found = StoredMeasurements(tmp_path, "key").read()
    assert found is not None
    assert found.steps == STEPS


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        StoredMeasurements(tmp_path / "file" / "folder", "key").write(STEPS, None)
    assert "cannot be kept" in caplog.text


def test_other_kernels_or_another_size_have_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert step_key("H100", 256) == step_key("H100", 256)
    assert len({step_key("H100", 256), step_key("H100", 128), step_key("H200", 256)}) == 3
    (tmp_path / "linear").mkdir()
    (tmp_path / "__init__.py").touch()
    source = tmp_path / "linear" / "gemm.py"
    source.write_text("BM = 64")
    monkeypatch.setattr(moeserve.kernels, "__file__", str(tmp_path / "__init__.py"))
    sources = stored.kernel_sources.__wrapped__  # what a process that has not asked finds
    before = sources()
    assert sources() == before
    source.write_text("BM = 128")
    assert sources() != before
