"""What --speculative-config takes, and what it says of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.cli.command_line import read_options, resolve
from moeserve.config import Drafts, Lookup, drafts_of
from moeserve.errors import ConfigError


def read(value: str) -> Drafts | None:
    return drafts_of(resolve(read_options({"speculative_config": value}, {})))


def test_off_by_default() -> None:
    assert drafts_of(read_options({}, {})) is None


@pytest.mark.parametrize(
    ("more", "drafts"),
    [
        ("", Drafts("ngram", 4, Lookup(3, 16))),
        (', "prompt_lookup_min": 2, "prompt_lookup_max": 5', Drafts("ngram", 4, Lookup(2, 5))),
        (', "prompt_lookup_max": 4', Drafts("ngram", 4, Lookup(4, 4))),  # as vLLM does
        (', "prompt_lookup_min": 2', Drafts("ngram", 4, Lookup(2, 2))),
    ],
)
def test_ngram(more: str, drafts: Drafts) -> None:
    assert read('{"method": "ngram", "num_speculative_tokens": 4' + more + "}") == drafts


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"num_speculative_tokens": 4}', "method null"),
        ('{"method": "eagle3", "num_speculative_tokens": 4}', "eagle3"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 4.5}', "whole number"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "whole number"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}', "ngram takes no model"),
        ('{"method": "draft_model", "num_speculative_tokens": 4}', "method draft_model needs one"),
        ('{"model": "", "num_speculative_tokens": 4}', "model: a file"),
        ('{"model": 5, "num_speculative_tokens": 4}', "model: a file"),
        ('{"model": "x.gguf"}', "num_speculative_tokens"),
        (
            '{"model": "x.gguf", "num_speculative_tokens": 4, "prompt_lookup_min": 2}',
            "prompt_lookup_min: no such",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            "less than",
        ),
    ],
)
def test_refused_by_name(value: str, cause: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config") as error:
        read(value)
    assert cause in str(error.value)


def test_a_small_model(tmp_path: Path) -> None:
    """By the flag, in the JSON, or both; the path is made absolute, and what is read again says the same."""
    path = str(tmp_path / "small.gguf")
    Path(path).touch()
    alone = resolve(read_options({"speculative_model": path}, {}))
    assert drafts_of(alone) == Drafts("draft_model", 5, None, path)
    config = f'{{"model": {json.dumps(path)}, "num_speculative_tokens": 3}}'
    in_json = resolve(read_options({"speculative_config": config}, {}))
    assert drafts_of(in_json) == Drafts("draft_model", 3, None, path)
    assert drafts_of(resolve(in_json)) == drafts_of(in_json)
    config = '{"method": "auto", "num_speculative_tokens": 7}'
    both = resolve(read_options({"speculative_model": path, "speculative_config": config}, {}))
    assert drafts_of(both) == Drafts("auto", 7, Lookup(3, 16), path)


def test_a_small_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-model: there is no") as error:
        resolve(read_options({"speculative_model": str(tmp_path / "none.gguf")}, {}))
    assert "none.gguf" in str(error.value)
    config = '{"model": "a.gguf", "num_speculative_tokens": 3}'
    with pytest.raises(ConfigError, match="is not the one of --speculative-model"):
        resolve(read_options({"speculative_model": "b.gguf", "speculative_config": config}, {}))
