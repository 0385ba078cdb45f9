"""Llama-Nemotron: layers without attention, without a feed-forward, and without either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS, transformers_logits
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.deci_model import write_model
from tests.support.models.folder_as_gguf import write_gguf


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("deci") / "tiny"
    return folder, write_model(folder)


def test_a_folder_is_what_llamas_layers_compute(
    written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = written
    truth = transformers_logits(model, monkeypatch)
    logits = Engine(stream_of(ISAS[0], threads=1), folder).logits(TOKENS)
    assert nmse(logits, truth) < 1e-7
    assert torch.equal(logits.argmax(-1), truth.argmax(-1))


def test_a_file_is_what_its_folder_is(written: tuple[Path, Any], tmp_path: Path) -> None:
    """Heads, KV heads and widths are numbers of each layer there."""
    folder, _ = written
    write_gguf(folder, tmp_path / "tiny.gguf")
    file, same = (
        Engine(stream_of(ISAS[0]), path).logits(TOKENS) for path in (tmp_path / "tiny.gguf", folder)
    )
    assert torch.equal(file, same)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("attention", {"replace_with_linear": True}, "'replace_with_linear' of 'block_configs' is True"),
        ("attention", {"window_length": 512}, "'window_length' of 'block_configs' is 512"),
        ("attention", {"n_heads_in_group": 3}, "it must divide"),
        ("attention", {"n_heads_in_group": None}, "'n_heads_in_group' is missing"),
        ("attention", {"no_op": True}, "attn_norm.weight' has no place"),
        ("ffn", {"replace_with_linear": True}, "'replace_with_linear' of 'block_configs' is True"),
        ("ffn", {"ffn_mult": "x"}, "'ffn_mult' is 'x'"),
        ("ffn", {"ffn_mult": 30.0}, "has shape"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(
    written: tuple[Path, Any], part: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in written[0].iterdir():
        (folder / file.name).symlink_to(file)
    blocks = json.loads((folder / "config.json").read_text())["block_configs"]
    blocks[0][part] |= change
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(config)
    edit_config(folder, block_configs=blocks)
    with pytest.raises(ModelError, match=message):
        read_checked_shape(open_folder(folder))
