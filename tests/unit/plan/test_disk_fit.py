"""`moeserve plan` of a model whose experts do not fit in RAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.kv.layout import KvLayout
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.expert_ram import READER_BYTES, dense_bytes, expert_bytes
from moeserve.placement.sizes import ModelSizes
from tests.support.plan_command import run


@pytest.mark.usefixtures("no_measuring")
def test_what_ram_holds_and_a_token_reads(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    file = open_gguf(tiny_model)
    sizes = ModelSizes.of(file.tensors, KvLayout(read_shape(file)))
    budget = 0.7 * expert_bytes(sizes) / (1 << 30)
    flags = ("--model", str(tiny_model), "--ram", "4", "--device", "cpu", "--expert-ram", f"{budget:.6f}")
    shown = run(capsys, *flags, "--disk-bandwidth", "0.1")
    experts = shown["memory"]["ram_weights"] - dense_bytes(sizes) - READER_BYTES
    assert 0.6 < experts / expert_bytes(sizes) <= 0.7
    assert any("at 0.1 GB/s (--disk-bandwidth)" in caution for caution in shown["cautions"])
