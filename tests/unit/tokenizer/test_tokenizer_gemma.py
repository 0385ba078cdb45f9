"""Gemma's tokenizer: characters joined by merges, spaces as another character, bytes for what has no token; beside one
trained and run by the tokenizers library as Gemma's tokenizer.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.models.gemma_tokens import BYTES, CONTROLS, CORPUS, TEXTS, USER_DEFINED, theirs
from tests.support.models.gguf_bytes import gguf_bytes, model_metadata


def ours(path: Path, tokenizer: Tokenizer, **changes: object) -> TextTokenizer:
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    # As llama.cpp's converter has them.
    kinds = [3 if p in CONTROLS else 4 if p in USER_DEFINED else 6 if p in BYTES else 1 for p in pieces]
    metadata = {
        "tokenizer__ggml__model": "gemma4",
        "tokenizer__ggml__pre": None,
        "tokenizer__ggml__tokens": pieces,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer__ggml__eos_token_id": pieces.index("<eos>"),
        "tokenizer__ggml__bos_token_id": pieces.index("<bos>"),
    }
    path.write_bytes(gguf_bytes(model_metadata(**(metadata | changes))))
    return TextTokenizer.from_gguf(open_gguf(path))


def test_ids_and_texts_are_the_tokenizers_librarys(tmp_path: Path) -> None:
    reference = theirs()
    tokenizer = ours(tmp_path / "model.gguf", reference)
    for text in (*TEXTS, *CORPUS[:3]):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special=False) == text
    assert any(len(tokenizer.token_bytes(i)) > 2 for i in tokenizer.encode("Hello\n\n"))  # merges apply


def test_what_ends_an_answer_and_begins_a_prompt(tmp_path: Path) -> None:
    tokenizer = ours(tmp_path / "model.gguf", theirs())
    vocabulary = tokenizer.vocabulary
    ends = [tokenizer.encode(text)[0] for text in ("<eos>", "<turn|>", "<|tool_response>")]
    assert set(vocabulary.eos_ids) == set(ends)
    assert vocabulary.add_bos
    # A file says it is a user-defined one.
    assert tokenizer.encode("<|tool_response>")[0] in vocabulary.special
    assert tokenizer.decode(tokenizer.encode("<|tool_call>x")) == "<|tool_call>x"
    typed = tokenizer.encode("<turn|>", parse_special=False)
    assert len(typed) > 1
    assert tokenizer.decode(typed) == "<turn|>"


def test_a_byte_that_no_token_names_is_refused(tmp_path: Path) -> None:
    reference = theirs()
    kinds = [6] * reference.get_vocab_size()
    with pytest.raises(ModelError, match="its text names no byte"):
        ours(tmp_path / "model.gguf", reference, tokenizer__ggml__token_type=kinds)
