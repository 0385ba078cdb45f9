"""--isa and MOESERVE_ISA: the worker runs the instruction set that it was told to, or says why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeserve.cli import main as cli
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.worker.loading.load import load_runner


def config(model: Path, isa: str) -> ServerConfig:
    asked = cli.parse(
        cli.serve_parser(), ["--max-total-tokens", "256", "--max-num-seqs", "2"], {"MOESERVE_ISA": isa}
    )
    return dataclasses.replace(asked, model=str(model), threads=1)


def test_the_worker_runs_what_the_environment_says(tiny_model: Path) -> None:
    runner = load_runner(config(tiny_model, "plain"), lambda *_: None)
    assert runner.ready().device == "cpu (plain, 1 threads)"


def test_an_instruction_set_that_is_missing_is_named_before_the_model_is_opened() -> None:
    """No CPU has every one of them; this stands for those that a machine lacks."""
    missing = dataclasses.replace(config(Path("no such file"), "auto"), isa="avx1024")
    with pytest.raises(ConfigError, match=r"--isa or MOESERVE_ISA: .* no 'avx1024' kernels"):
        load_runner(missing, lambda *_: None)
