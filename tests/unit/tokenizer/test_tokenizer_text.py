"""TextTokenizer gives the ids that llama.cpp and Hugging Face give, and loses no byte."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import TextTokenizer
from tests.conftest import OWN_FIXTURES, TINY_MODEL
from tests.support.models.gguf_bytes import MERGES, TOKENS, gguf_bytes, model_metadata

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

FRAGMENTS = ["'s", "'LL", "'Re", "'T", "EST", "The", "ation", "12345", " ", "  ", "\n", "\r\n", "!!", "。"]
TEXT = (
    st.text()
    | st.text(alphabet=st.sampled_from(" \n\r\tab'stS1٣ée\u0301ſ中😀\u200d.,<|>{}\u2028"))
    | st.lists(st.sampled_from(FRAGMENTS)).map("".join)
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(TINY_MODEL))


@pytest.fixture(scope="module")
def reference() -> Qwen2Tokenizer:
    """Hugging Face's Qwen2 tokenizer over the same vocabulary."""
    from transformers import Qwen2Tokenizer

    metadata = open_gguf(TINY_MODEL).metadata
    vocab = {piece.decode(): i for i, piece in enumerate(metadata.require_strings("tokenizer.ggml.tokens"))}
    merges: Any = [tuple(m.decode().split(" ")) for m in metadata.require_strings("tokenizer.ggml.merges")]
    return Qwen2Tokenizer(  # pairs are what the tokenizers library takes; the annotation is of files
        vocab=vocab, merges=merges, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )


def test_llama_cpp_vectors(wide_fixtures: Path) -> None:
    folder = wide_fixtures / "tokenizer"
    full = TextTokenizer.from_gguf(open_gguf(folder / "qwen2-vocab.gguf"))
    content = (folder / "qwen2-vocab.inp").read_bytes().decode()  # not read_text: it would turn \r\n into \n
    texts = content.split("\n__ggml_vocab_test__\n")
    expected = [
        [int(i) for i in line.split()] for line in (folder / "qwen2-vocab.out").read_text().split("\n")
    ]
    assert len(texts) == len(expected) == 47
    for text, ids in zip(texts, expected, strict=True):
        assert full.encode(text, parse_special=False) == ids, text
        assert full.decode(ids) == text


def _check_golden(model: Path, golden: Path) -> None:
    tokenizer = TextTokenizer.from_gguf(open_gguf(model))
    cases = json.loads(golden.read_text())["cases"]
    assert cases
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["tokens"], case["text"]


def test_golden_ids_of_the_packaged_model() -> None:
    _check_golden(TINY_MODEL, OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.golden.json")


def test_golden_ids_of_every_wide_fixture(wide_fixtures: Path) -> None:
    models = sorted(wide_fixtures.glob("tiny-qwen3moe-*.gguf"))
    assert models
    for model in models:
        _check_golden(model, model.with_suffix(".golden.json"))


@given(text=TEXT)
def test_decode_undoes_encode_up_to_nfc(tokenizer: TextTokenizer, text: str) -> None:
    """Qwen's own tokenizer brings text into the form NFC; beyond that no byte changes."""
    ids = tokenizer.encode(text, parse_special=False)
    raw = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert raw == unicodedata.normalize("NFC", text).encode()
    assert tokenizer.decode(ids) == raw.decode()


@given(text=TEXT)
def test_ids_are_hugging_faces(tokenizer: TextTokenizer, reference: Qwen2Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


def test_special_tokens_are_parsed_only_when_asked(tokenizer: TextTokenizer) -> None:
    text = "<|im_start|>user\n<think>x</think><|im_end|>"
    vocabulary = tokenizer.vocabulary
    parsed = tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert parsed[0] == vocabulary.token_bytes.index(b"<|im_start|>")
    assert not vocabulary.special & set(plain)
    # User-defined tokens are part of the text either way.
    think = vocabulary.token_bytes.index(b"<think>")
    assert think in parsed
    assert think in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed, skip_special=False) == text
    assert tokenizer.decode(parsed) == "user\n<think>x</think>"


def test_batch_is_the_same_as_one_by_one(tokenizer: TextTokenizer) -> None:
    texts = ["", "Hello, world!", "<|im_end|> é\u0301", "  \n\n x"]
    for parse_special in (True, False):
        assert tokenizer.encode_batch(texts, parse_special) == [
            tokenizer.encode(t, parse_special) for t in texts
        ]


def test_text_that_is_not_unicode_and_ids_that_do_not_exist(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", "\udfff"])
    for token_id in (-1, 4096):
        with pytest.raises(IndexError):
            tokenizer.decode([token_id])
    half_a_character = tokenizer.encode("世")[0]
    assert tokenizer.token_text(half_a_character) == "\ufffd"


def test_a_byte_that_no_token_spells_does_not_vanish(tmp_path: Path) -> None:
    """SmolLM2's vocabulary lacks 0x04 and others."""
    path = tmp_path / "model.gguf"
    tokens = ["xyz" if byte == 4 else "uvw" if byte == 0xF0 else token for byte, token in enumerate(TOKENS)]
    path.write_bytes(gguf_bytes(model_metadata(tokenizer__ggml__tokens=tokens)))
    tokenizer = TextTokenizer.from_gguf(open_gguf(path))
    assert tokenizer.missing_bytes == {0x04, 0xF0}
    assert tokenizer.decode(tokenizer.encode("a\x04b é 世 😀")) == "a\ufffdb é 世 \ufffd"
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(["\x04", "\x05"])] == ["\ufffd", "\x05"]
    tokens[0xBF] = "rst"  # of U+FFFD
    path.write_bytes(gguf_bytes(model_metadata(tokenizer__ggml__tokens=tokens)))
    assert TextTokenizer.from_gguf(open_gguf(path)).encode("\x04") == [tokens.index("?")]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tokenizer__ggml__model": "bert"}, "'tokenizer.ggml.model' is 'bert', which is not supported"),
        (
            {"tokenizer__ggml__pre": "bloom"},
            "'tokenizer.ggml.pre' is 'bloom', which is not supported",
        ),
        ({"tokenizer__ggml__pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "ab"]}, "holds 'ab' twice"),
        ({"tokenizer__ggml__merges": [*MERGES, "b c"]}, "holds b'b c', whose parts or whole are not in"),
        ({"tokenizer__ggml__merges": ["ab"]}, "holds b'ab', whose parts"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata(**changes)))
    with pytest.raises(ModelError) as caught:
        TextTokenizer.from_gguf(open_gguf(path))
    assert cause in str(caught.value)


def test_merges_apply_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata()))
    built = TextTokenizer.from_gguf(open_gguf(path))
    assert [built.token_text(i) for i in built.encode("abcab")] == ["abc", "ab"]
