"""Vocabulary: token ids to bytes, and which ids are special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import TextTokenizer, Vocabulary
from moeserve.tokenizer.vocabulary import byte_alphabet
from tests.support.models.gguf_bytes import TOKEN_TYPES, TOKENS, gguf_bytes, model_metadata


def _vocabulary(tmp_path: Path, **changes: Any) -> Vocabulary:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata(**changes)))
    return Vocabulary.from_gguf(open_gguf(path))


def test_alphabet_is_gpt2s() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[0x20], alphabet[0x0A], alphabet[0x41], alphabet[0x00]) == ("Ġ", "Ċ", "A", "Ā")
    assert (alphabet[0x7F], alphabet[0xA0], alphabet[0xAD], alphabet[0xFF]) == ("ġ", "ł", "Ń", "ÿ")


def test_packaged_vocabulary(tiny_model: Path) -> None:
    vocabulary = Vocabulary.from_gguf(open_gguf(tiny_model))
    assert vocabulary.size == 4096
    assert [vocabulary.token_bytes[i] for i in sorted(vocabulary.special)] == [
        b"<|endoftext|>",
        b"<|im_start|>",
        b"<|im_end|>",
    ]
    assert b"<think>" in {vocabulary.token_bytes[i] for i in vocabulary.user_defined}
    assert vocabulary.eos_ids == (4089, 4087)  # <|im_end|> of the metadata first, <|endoftext|> beside it
    assert (vocabulary.bos_id, vocabulary.add_bos) == (4087, False)
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary.token_bytes)


def test_kinds_of_tokens(tmp_path: Path) -> None:
    """Control, user-defined and unused tokens are plain text; so is a piece outside the byte alphabet."""
    tokens = [*TOKENS, "é", "Ã©", "日本"]
    types = [*TOKEN_TYPES[:-2], 4, 5, 4, 1, 1]
    vocabulary = _vocabulary(
        tmp_path, tokenizer__ggml__tokens=tokens[:], tokenizer__ggml__token_type=types[:]
    )
    assert vocabulary.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.token_bytes[256:] == [
        b"ab",
        b"abc",
        b"<|endoftext|>",
        b"<|im_start|>",
        b"<|im_end|>",
        b"<think>",
        b"[PAD]",
        "é".encode(),  # user-defined: itself, not byte E9
        "é".encode(),  # byte-level: C3 A9
        "日本".encode(),
    ]
    assert vocabulary.unused == {262}
    assert vocabulary.user_defined == {261, 263}
    assert (vocabulary.bos_id, vocabulary.add_bos) == (None, False)


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [
        ("qwen2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer__ggml__add_bos_token": False}, False),
    ],
)
def test_llama_3_begins_a_text_where_its_file_does_not_say(
    tmp_path: Path, pre: str, said: dict[str, bool], expected: bool
) -> None:
    named = {"tokenizer__ggml__pre": pre, "tokenizer__ggml__bos_token_id": 258}
    assert _vocabulary(tmp_path, **named, **said).add_bos is expected
    assert not _vocabulary(tmp_path, tokenizer__ggml__pre=pre).add_bos


def test_eos_comes_from_the_metadata_and_from_qwens_control_tokens(tmp_path: Path) -> None:
    end, text_end, think = (TOKENS.index(t) for t in ("<|im_end|>", "<|endoftext|>", "<think>"))
    assert _vocabulary(tmp_path).eos_ids == (end, text_end)
    assert _vocabulary(tmp_path, tokenizer__ggml__eos_token_id=None).eos_ids == (end, text_end)
    assert _vocabulary(tmp_path, tokenizer__ggml__eot_token_id=think).eos_ids == (end, think, text_end)
    only_text = _vocabulary(
        tmp_path, tokenizer__ggml__tokens=["<|end|>" if t == "<|im_end|>" else t for t in TOKENS]
    )
    assert only_text.eos_ids == (
        end,
        text_end,
    )  # `<|end|>` ends a turn where no other token ends one of gpt-oss


def test_where_generation_config_names_ends_no_other_token_ends_a_text(tmp_path: Path) -> None:
    end, text_end, start = (TOKENS.index(t) for t in ("<|im_end|>", "<|endoftext|>", "<|im_start|>"))
    assert _vocabulary(tmp_path, tokenizer__generation_end_ids=[start]).eos_ids == (start, end)
    both = _vocabulary(tmp_path, tokenizer__generation_end_ids=[end, text_end])
    assert both.eos_ids == (end, text_end)
    assert _vocabulary(tmp_path, tokenizer__config_end_ids=[start]).eos_ids == (end, start, text_end)


@pytest.mark.parametrize("kind", [1, 2, 4, 5])
def test_tokens_are_what_their_text_says(tmp_path: Path, kind: int) -> None:
    """Whatever the file calls them: ends and starts are control tokens, the tags of thinking and tools are text that
    is matched whole."""
    controls = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    more = ["<|eot_id|>", "<|turn>", "<｜User｜>", "</think>", "<tool_call>", "<｜tool▁sep｜>", "<br>", "Ġ<"]
    tokens = [*TOKENS, *more]
    kinds = [kind if token in controls else old for token, old in zip(TOKENS, TOKEN_TYPES, strict=True)]
    vocabulary = _vocabulary(
        tmp_path,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[*kinds, *([kind] * 6), *([1] * 2)],
        tokenizer__ggml__eos_token_id=tokens.index("<|endoftext|>"),
    )

    def texts(ids: frozenset[int]) -> set[str]:
        return {vocabulary.token_bytes[token_id].decode() for token_id in ids}

    assert texts(vocabulary.special) == {*controls, "<|eot_id|>", "<|turn>", "<｜User｜>"}
    assert texts(vocabulary.user_defined) == {"<think>", "</think>", "<tool_call>", "<｜tool▁sep｜>"}
    ends = [vocabulary.token_bytes[token_id].decode() for token_id in vocabulary.eos_ids]
    assert ends == ["<|endoftext|>", "<|im_end|>", "<|eot_id|>"]
    tokenizer = TextTokenizer.from_gguf(open_gguf(tmp_path / "model.gguf"))
    for text in (*controls, *more[:6]):
        assert len(tokenizer.encode(text)) == 1
    assert len(tokenizer.encode("<br>")) == 4


def test_thinking_tags_are_text_and_tool_tags_may_be_control_tokens(tmp_path: Path) -> None:
    tokens = [*TOKENS, "</think>", "<tool_call>"]
    kinds = [3 if token == "<think>" else old for token, old in zip(TOKENS, TOKEN_TYPES, strict=True)]
    vocabulary = _vocabulary(
        tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[*kinds, 3, 3]
    )
    assert {tokens.index("<think>"), tokens.index("</think>")} <= vocabulary.user_defined
    assert tokens.index("<tool_call>") in vocabulary.special


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tokenizer__ggml__tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], b"\xff"]}, "which is not valid UTF-8"),
        (
            {"tokenizer__ggml__token_type": TOKEN_TYPES[1:]},
            "'tokenizer.ggml.token_type' has 262 entries, 263",
        ),
        ({"tokenizer__ggml__tokens": ["a" * 70_000, *TOKENS[1:]]}, "token 0 has 70000 bytes; 65536 at most"),
        ({"tokenizer__ggml__eos_token_id": 263}, "'tokenizer.ggml.eos_token_id' is 263; 0 to 262"),
        ({"tokenizer__ggml__add_bos_token": True}, "no tokenizer.ggml.bos_token_id is given"),
        (
            {
                "tokenizer__ggml__eos_token_id": None,
                "tokenizer__ggml__tokens": [token.replace("<|", "<?") for token in TOKENS],
            },
            "no end-of-sequence token",
        ),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError) as caught:
        _vocabulary(tmp_path, **changes)
    assert cause in str(caught.value)
