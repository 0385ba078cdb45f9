"""Which tokens end an answer of a Hugging Face folder: generation_config.json's, else config.json's and those known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.huggingface.tokenizer_json import read_tokenizer
from moeserve.models.sources.huggingface.wrapped_text import text_config
from moeserve.tokenizer.vocabulary import Vocabulary
from tests.fuzz.folder_mutations import base_files
from tests.support.models.gguf_bytes import TOKENS

TURN, TEXT, A, B = (TOKENS.index(piece) for piece in ("<|im_end|>", "<|endoftext|>", "a", "b"))


class Folder:
    """A folder's tokenizer as a model's source."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.metadata = Metadata(path, read_tokenizer(path, config, len(TOKENS)))


def ends_of(
    path: Path, generation: object, config: object = None, *, outer: object = None
) -> tuple[int, ...]:
    """generation, config: the files' eos_token_id. outer: config.json's beside its text_config, which has `config`."""
    files = base_files()
    files["generation_config.json"] = {"eos_token_id": generation}
    files["tokenizer_config.json"].pop("eos_token")
    files["config.json"]["eos_token_id"] = config
    if outer is not None:
        files["config.json"] = {"text_config": files["config.json"], "eos_token_id": outer}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return Vocabulary.from_gguf(Folder(path, text_config(files["config.json"]))).eos_ids  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (A, TEXT, (A, TURN)),
        ([A], TEXT, (A, TURN)),
        ([A, B], None, (A, B, TURN)),
        ([TEXT], A, (TEXT, TURN)),
        (None, A, (A, TURN, TEXT)),
        ([], A, (A, TURN, TEXT)),
        ([], [], (TURN, TEXT)),
        (None, [B, A], (B, A, TURN, TEXT)),
        (None, None, (TURN, TEXT)),
        (0, A, (0, TURN)),
    ],
)
def test_the_ends_of_an_answer(
    tmp_path: Path, generation: object, config: object, ends: tuple[int, ...]
) -> None:
    assert ends_of(tmp_path, generation, config) == ends


def test_the_end_that_a_multimodal_config_names_outside_its_text(tmp_path: Path) -> None:
    assert ends_of(tmp_path, None, None, outer=[B]) == (B, TURN, TEXT)
    assert ends_of(tmp_path, None, A, outer=[B]) == (B, TURN, TEXT)
    assert ends_of(tmp_path, A, None, outer=[B]) == (A, TURN)


@pytest.mark.parametrize("wrong", [True, [True], -1, [A, -1], len(TOKENS), "5", [[A]], {"a": 1}, 1.0, [None]])
def test_what_is_no_token_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id is"):
        ends_of(tmp_path, wrong)
    with pytest.raises(ModelError, match="eos_token_id is"):
        ends_of(tmp_path, None, wrong)
