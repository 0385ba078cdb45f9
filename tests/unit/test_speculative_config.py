"""What --speculative-config takes, and what it says of the rest."""

from __future__ import annotations

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
        ('{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}', "model: no such field"),
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
