"""Cached segments have the tokens that the whole text has, and are not encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import TextTokenizer, token_cache
from moeserve.tokenizer.token_cache import ENTRY_TOKENS, MIN_CHARS, TokenCache
from tests.conftest import OWN_FIXTURES, TINY_MODEL

# Byte-level BPE, Gemma's BPE over characters, and one that puts a space before a text, which is not cached.
MODELS = {
    "qwen": TINY_MODEL,
    "gemma": OWN_FIXTURES / "tiny-gemma3-q4_k_m.gguf",
    "mixtral": OWN_FIXTURES / "tiny-mixtral-q4_k_m.gguf",
}
LONG = "A tool's description, which every turn brings again. " * 40
assert len(LONG) > MIN_CHARS


class CountingTokenizer(TextTokenizer):
    """Counts the characters that it encodes in batches."""

    characters = 0

    def encode_batch(self, texts: Sequence[str], parse_special: bool = True) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_batch(texts, parse_special)


def of_model(path: Path) -> CountingTokenizer:
    tokenizer = CountingTokenizer.from_gguf(open_gguf(path))
    assert isinstance(tokenizer, CountingTokenizer)
    return tokenizer


def end_of(tokenizer: TextTokenizer) -> str:
    return tokenizer.token_text(tokenizer.vocabulary.eos_ids[0])


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request: pytest.FixtureRequest) -> CountingTokenizer:
    return of_model(MODELS[request.param])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokens_are_the_whole_texts(tokenizer: CountingTokenizer, data: st.DataObject) -> None:
    vocabulary = tokenizer.vocabulary
    whole = [tokenizer.token_text(i) for i in sorted(vocabulary.special | vocabulary.user_defined)][:64]
    end = end_of(tokenizer)
    pieces = st.sampled_from(
        [*whole, end, end, end[:-1], end[1:], " ", "\n", "e\u0301", "\u0301", LONG, "😀", "<"]
    )
    parts = data.draw(st.lists(st.lists(pieces | st.text(max_size=6), max_size=8).map("".join), max_size=3))
    cache = TokenCache(tokenizer)
    for _ in range(2):
        assert cache.encode_parts(parts, "a") == tokenizer.encode_parts(parts)


@pytest.mark.parametrize("model", ["qwen", "gemma"])
def test_a_further_turn_is_all_that_is_encoded(model: str) -> None:
    tokenizer = of_model(MODELS[model])
    cache, end = TokenCache(tokenizer), end_of(tokenizer)
    text = "".join(LONG + str(turn) + end for turn in range(5))
    cache.encode_parts([text], "a")
    assert tokenizer.characters == len(text)
    tokenizer.characters = 0
    more = LONG + "another" + end
    cache.encode_parts([text + more], "a")
    assert tokenizer.characters == len(more)
    tokenizer.characters = 0
    cache.encode_parts([text + more], "b")  # another tenant may not find out by the time it takes
    assert tokenizer.characters == len(text + more)


def test_what_was_not_used_for_longest_is_dropped() -> None:
    tokenizer = of_model(MODELS["qwen"])
    end = end_of(tokenizer)
    first, second, third = (LONG + str(turn) + end for turn in range(3))
    size = len(tokenizer.encode(first)) + 16 + ENTRY_TOKENS
    cache = TokenCache(tokenizer, max_tokens=4 * size)
    for text in (first, second, first, third):
        cache.encode_parts([text], "a")
    tokenizer.characters = 0
    cache.encode_parts([first], "a")
    cache.encode_parts([third], "a")
    assert tokenizer.characters == 0
    cache.encode_parts([second], "a")
    assert tokenizer.characters == len(second)


def test_a_tenant_drives_out_no_other() -> None:
    tokenizer = of_model(MODELS["qwen"])
    end = end_of(tokenizer)
    cache = TokenCache(tokenizer, max_tokens=6 * (len(tokenizer.encode(LONG + end)) + 16 + ENTRY_TOKENS))
    cache.encode_parts([LONG + end], "quiet")
    for turn in range(20):  # each salt is new, too
        cache.encode_parts([LONG + str(turn) + end], "busy", str(turn))
    tokenizer.characters = 0
    cache.encode_parts([LONG + end], "quiet")
    assert tokenizer.characters == 0
    for turn in range(20):
        cache.encode_parts([LONG + end], f"another {turn}")
    assert sum(part.tokens for part in cache._kept.values()) <= cache._max_tokens
    assert len(cache._kept) <= 6


def test_salts_with_nul_are_apart() -> None:
    tokenizer = of_model(MODELS["qwen"])
    cache = TokenCache(tokenizer)
    cache.encode_parts([LONG + "\0t\0x"], "t", "s")
    tokenizer.characters = 0
    cache.encode_parts([LONG], "t", "x\0t\0s")
    assert tokenizer.characters == len(LONG)


def test_no_cut_behind_a_token_that_another_reaches_into() -> None:
    """The longest match wins, and of two that overlap the earlier one."""
    assert token_cache._reaches("<|end|>\n", "<|end|>")
    assert token_cache._reaches("x<", "<|end|>")
    assert not token_cache._reaches("<|end", "<|end|>")
    assert not token_cache._reaches("|>x", "<|end|>")
