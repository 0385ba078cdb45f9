"""The split expressions, read by another engine of regular expressions, and by what their publishers say of them."""

from __future__ import annotations

import functools
import unicodedata
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.models.sources.splits import (
    AFMOE,
    BAILING,
    BY_EXPRESSIONS,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DEEPSEEK_V3,
    EXAONE_MOE,
    GLM4,
    GPT2,
    KIMI_K2,
    LAGUNA,
    MINICPM5,
    O200K,
    QWEN2,
    QWEN35,
    SEED_CODER,
    SMOLLM,
    SPLITS,
    VIKING,
    YOUTU,
    Split,
)
from moeserve.tokenizer.text_tokenizer import pre_tokenizer
from moeserve.tokenizer.vocabulary import byte_alphabet

ALL = list(BY_EXPRESSIONS.values())
BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}
FRAGMENTS = [
    "'s",
    "'LL",
    "'Re",
    "camelCase",
    "HTTPSession",
    "12345",
    " ",
    "  ",
    "\n",
    "\r\n",
    "!!/",
    "//\n",
    "é",
    "ǅ",
    "ก็",
]
TEXT = st.text(alphabet=st.sampled_from(" \n\r\tab'stS1٣ée\u0301中😀\u200d.,<|>{}/ª")) | st.lists(
    st.sampled_from(FRAGMENTS)
).map("".join)


compiled = functools.cache(pre_tokenizer)


def words(split: Split, text: str) -> list[str]:
    pieces = [piece for piece, _ in compiled(split).pre_tokenize_str(text)]
    return [bytes(BYTE_OF[character] for character in piece).decode() for piece in pieces]


def cut(expression: str, text: str) -> list[str]:
    """Its matches and what is between them."""
    ends = [
        0,
        *(end for match in regex.finditer(expression, text, regex.V1) for end in match.span()),
        len(text),
    ]
    return [text[a:b] for a, b in pairwise(ends) if a < b]


@pytest.mark.parametrize("split", ALL, ids=lambda split: split.names[0])
@settings(deadline=None, max_examples=50)
@given(text=TEXT)
def test_another_engine_finds_the_same_words(split: Split, text: str) -> None:
    found = words(split, text)
    expected = [text] if text else []
    for expression in split.expressions:
        expected = [word for piece in expected for word in cut(expression, piece)]
    assert found == expected
    assert "".join(found) == text


@pytest.mark.parametrize(
    ("split", "text", "expected"),
    [
        (QWEN2, "I'll add 123", ["I", "'ll", " add", " ", "1", "2", "3"]),
        (GLM4, "I'll add 12345", ["I", "'ll", " add", " ", "123", "45"]),
        (SMOLLM, "I'll DON'T 123", ["I", "'ll", " DON", "'", "T", " ", "1", "2", "3"]),
        (SMOLLM, "see a//b\n\n c", ["see", " a", "//", "b", "\n\n", " c"]),
        (O200K, "I'll add 12345", ["I'll", " add", " ", "123", "45"]),
        (O200K, "camelCase HTTPSession", ["camel", "Case", " HTTPSession"]),
        (O200K, "see a//b/\n\n c", ["see", " a", "//", "b", "/\n\n", " c"]),
        (GLM4, "camelCase // \n", ["camelCase", " //", " \n"]),
        # A vowel sign of Thai is a combining mark.
        (QWEN2, "ที่", ["ท", "ี่"]),
        (QWEN35, "ที่", ["ที่"]),
        (DEEPSEEK_V3, "I'll add 12345", ["I", "'ll", " add", " ", "123", "45"]),
        (DEEPSEEK_LLM, "I'll add 123", ["I", "'", "ll", " add", " ", "1", "2", "3"]),
        (
            DEEPSEEK_LLM,
            "print(x) // 世界です ж\r\n ",
            ["print", "(", "x", ")", " //", " ", "世界です", " ж", "\r", "\n", " "],
        ),
        (KIMI_K2, "I'll add 12345//\n", ["I'll", " add", " ", "123", "45", "//\n"]),
        (KIMI_K2, "camelCase 世界です", ["camel", "Case", " ", "世界", "です"]),
        (GPT2, "I'll DON'T 123", ["I", "'ll", " DON", "'", "T", " 123"]),
        (LAGUNA, "a  \n\n b", ["a", "  ", "\n\n", " b"]),
        (SEED_CODER, "a //\n\n 12", ["a", " //", "\n\n", " ", "1", "2"]),
        (BAILING, "I'LL //\n  \n\n 12", ["I", "'LL", " //\n", "  \n\n", " ", "1", "2"]),
        (
            EXAONE_MOE,
            "see the end, 12 of a//\n\n",
            ["see the end", ",", " ", "1", "2", " of a", "//\n", "\n"],
        ),
        (MINICPM5, "I'll add 12345", ["I", "'ll", " add", " ", "123", "45"]),
        (VIKING, "see a. 12b", ["see", " a", ".", " ", "1", "2", "b"]),
        (YOUTU, "camelCase 世界です한국12", ["camel", "Case", " ", "世界です", "한국", "1", "2"]),
        (
            AFMOE,
            "add 1234567 12 123 世界",
            ["add", " ", "1", "234", "567", " ", "12", " ", "123", " ", "世界"],
        ),
        (DEEPSEEK_CODER, "f(x) // 世界12", ["f", "(", "x", ")", " //", " ", "世界", "1", "2"]),
        (DEEPSEEK_V3, "print(x) // 世界です\r\n", ["print", "(x", ")", " //", " ", "世界です", "\r\n"]),
    ],
)
def test_what_tells_them_apart(split: Split, text: str, expected: list[str]) -> None:
    assert words(split, text) == expected


def test_the_letters_of_deepseek_v2_have_cases() -> None:
    """The publisher wrote down a class of 160 ranges by hand; an end that is off would show here."""
    letters = regex.compile(DEEPSEEK_LLM.before[1].removeprefix(r"\s?").removesuffix("+"))
    found = [chr(code) for code in range(0x20000) if letters.fullmatch(chr(code))]
    assert len(found) > 2200
    assert {unicodedata.category(letter) for letter in found} == {"Lu", "Ll", "Lt"}


def test_every_name_has_one_split() -> None:
    names = [name for split in dict.fromkeys(SPLITS.values()) for name in split.names]
    assert sorted(names) == sorted(SPLITS)
