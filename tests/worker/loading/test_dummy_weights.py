"""--load-format dummy: the engine runs on random weights of a file's shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.support.models.header_only import write_header_only


def test_the_engine_runs_on_them(tiny_model: Path, tmp_path: Path) -> None:
    header_only = write_header_only(tiny_model, tmp_path / "header.gguf")
    config = small_config(header_only, load_format="dummy", threads=1)
    driver = Driver(load_cpu_runner(config, lambda *_: None))
    tokens = driver.generate(0, [1, 2, 3], 4)
    assert len(tokens) == 4
    assert min(tokens) >= 0


def test_not_in_place(tiny_model: Path) -> None:
    config = small_config(tiny_model, load_format="dummy", weight_layout="file", threads=1)
    with pytest.raises(ConfigError, match="--weight-layout"):
        load_cpu_runner(config, lambda *_: None)
