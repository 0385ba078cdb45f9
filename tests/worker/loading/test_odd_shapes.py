"""Shapes that the kernels cannot take are refused while loading: they check nothing themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.models.errors import ModelError
from moeserve.worker.loading.load import load_runner
from tests.support.models.gguf_bytes import gguf_bytes, model_metadata, model_tensors


def test_a_head_of_eight_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf_bytes(model_metadata(), model_tensors()))
    config = ServerConfig(model=str(path), threads=1, max_num_seqs=1, max_model_len=64)
    with pytest.raises(ModelError, match="key_length is 8; the CPU engine needs a multiple of 32"):
        load_runner(config, lambda *_: None)
