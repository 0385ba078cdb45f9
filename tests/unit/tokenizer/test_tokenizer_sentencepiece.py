"""SentencePiece's tokenizer of scores, as Llama 2's and Mistral's GGUF files have it, beside llama.cpp's token ids.

`tests/fixtures/sentencepiece.json` has a vocabulary of 700 tokens, and for each text what llama.cpp makes of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import Choice
from moeserve.grammar.translate import to_grammar
from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import OWN_FIXTURES
from tests.support.models.gguf_bytes import gguf_bytes, model_metadata

GIVEN: dict[str, Any] = json.loads((OWN_FIXTURES / "sentencepiece.json").read_text())


def tokenizer(path: Path, **changes: object) -> TextTokenizer:
    metadata = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__tokens": GIVEN["tokens"],
        "tokenizer__ggml__scores": GIVEN["scores"],
        "tokenizer__ggml__token_type": GIVEN["kinds"],
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    }
    given = metadata | changes
    if given["tokenizer__ggml__scores"] is None:
        del given["tokenizer__ggml__scores"]
    path.write_bytes(gguf_bytes(model_metadata(**given)))
    return TextTokenizer.from_gguf(open_gguf(path))


@pytest.mark.parametrize("prefix", [False, True])
def test_ids_are_llama_cpps(tmp_path: Path, prefix: bool) -> None:
    ours = tokenizer(tmp_path / "model.gguf", tokenizer__ggml__add_space_prefix=prefix)
    kind = "prefix" if prefix else "plain"
    for text in GIVEN["texts"]:
        assert ours.encode(text["text"], parse_special=False) == text["ids"][kind], text["text"]
        assert ours.encode(text["text"]) == text["ids"][f"{kind} special"], text["text"]


def test_a_file_that_does_not_say_has_a_space_before_its_texts_and_a_token_before_its_prompts(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path / "model.gguf")
    assert b"".join(map(ours.token_bytes, ours.encode("Hello"))) == b" Hello"
    assert ours.decode(ours.encode("Hello")) == "Hello"
    assert ours.vocabulary.add_bos
    assert not tokenizer(tmp_path / "other.gguf", tokenizer__ggml__add_bos_token=False).vocabulary.add_bos


def test_texts_come_back(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "model.gguf", tokenizer__ggml__add_space_prefix=False)
    for text in GIVEN["texts"]:
        spelled = text["text"].replace("\u2581", " ")  # the character that stands for a space
        assert ours.decode(ours.encode(text["text"], parse_special=False), skip_special=False) == spelled


def test_a_text_that_goes_on_has_no_space_before_it(tmp_path: Path) -> None:
    """llama.cpp's ids: those of a vocabulary without the space, and one space behind each control token."""
    ours = tokenizer(tmp_path / "model.gguf")
    for text in GIVEN["texts"]:
        assert ours.encode_rest(text["text"], parse_special=False) == text["ids"]["plain"]
    assert ours.encode_rest("[INST]hi") == ours.encode("[INST]hi")
    hi = ours.encode("hi</s>")
    assert ours.encode_parts(["<s>[INST]", "hi</s>"]) == [
        *ours.encode("<s>[INST]"),
        *ours.encode_rest("hi</s>"),
    ]
    assert ours.encode_rest("hi</s>") != hi
    assert ours.encode_parts(["hi</s>"]) == hi


def test_what_a_grammar_forces_has_no_space_before_it(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "model.gguf")
    matcher = GrammarEngine(ours).matcher(to_grammar(Choice(["Hello world"])))
    mask = np.zeros(22, np.int32)
    for token_id in ours.encode_rest("Hello world"):
        matcher.fill(mask)
        assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [token_id]
        matcher.accept(token_id)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "is missing"),
        ([0.0] * 3, "has 3 entries, 700 are expected"),
        ([math.nan] * 700, "not a number"),
        (["a"] * 700, "an array of numbers is expected"),
    ],
)
def test_scores_that_cannot_be_used(tmp_path: Path, scores: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer(tmp_path / "model.gguf", tokenizer__ggml__scores=scores)


def test_a_token_of_very_many_characters_is_refused(tmp_path: Path) -> None:
    tokens = [*GIVEN["tokens"][:-1], "x" * 257]
    with pytest.raises(ModelError, match="257 characters; 256 at most are supported"):
        tokenizer(tmp_path / "model.gguf", tokenizer__ggml__tokens=tokens)
