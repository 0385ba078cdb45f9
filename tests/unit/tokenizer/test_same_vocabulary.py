"""Which vocabularies allow one model to draft for another: those of published pairs, and none in which text differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from moeserve.models.errors import ModelError
from moeserve.models.open import open_metadata
from moeserve.models.sources.source import ModelSource
from moeserve.tokenizer.known_tokens import CONTROL, NORMAL, UNUSED
from moeserve.tokenizer.same_vocabulary import MOST_DIFFERENCES, check_same_vocabulary

WORDS = [f"word{number}" for number in range(1000)]


def source_of(folder: Path, name: str, tokens: list[str], kinds: list[int]) -> ModelSource:
    path = folder / f"{name}.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return open_metadata(path)


def with_controls(*controls: str, padding: int = 0) -> tuple[list[str], list[int]]:
    pads = [f"[PAD{number}]" for number in range(padding)]
    kinds = [NORMAL] * len(WORDS) + [CONTROL] * len(controls) + [UNUSED] * padding
    return [*WORDS, *controls, *pads], kinds


def check(folder: Path, large: tuple[list[str], list[int]], small: tuple[list[str], list[int]]) -> None:
    check_same_vocabulary(source_of(folder, "large", *large), source_of(folder, "small", *small))


def test_the_same(tmp_path: Path) -> None:
    check(tmp_path, with_controls("<end>"), with_controls("<end>"))


@pytest.mark.parametrize(("large", "small"), [(128, 0), (0, 128)])
def test_padding(tmp_path: Path, large: int, small: int) -> None:
    """Qwen2.5's large models have 152,064 rows, its small ones 151,936."""
    check(tmp_path, with_controls("<end>", padding=large), with_controls("<end>", padding=small))


def test_more_than_padding(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"token 1001 is missing here and .*PAD0.* there \(1001 and 1130"):
        check(tmp_path, with_controls("<end>", padding=MOST_DIFFERENCES + 1), with_controls("<end>"))


def test_other_control_tokens(tmp_path: Path) -> None:
    """A later release has calls: an unused token of the earlier one is now <tool_response>."""
    check(tmp_path, with_controls("<end>", "<tool_response>"), with_controls("<end>", padding=1))


def test_one_word_differs(tmp_path: Path) -> None:
    tokens, kinds = with_controls("<end>")
    other = [*tokens[:700], "another", *tokens[701:]]
    with pytest.raises(ModelError, match=r"token 700 is 'another' here and 'word700' there"):
        check(tmp_path, (tokens, kinds), (other, kinds))


def test_a_long_token_is_cut_in_the_message(tmp_path: Path) -> None:
    tokens, kinds = with_controls("<end>")
    with pytest.raises(ModelError) as error:
        check(tmp_path, (tokens, kinds), (["x" * 5000, *tokens[1:]], kinds))
    assert "token 0 is" in str(error.value)
    assert "x" * 41 not in str(error.value)
