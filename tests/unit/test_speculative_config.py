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
        ("[]", "write a JSON object"),
        ('{"num_speculative_tokens": 4}', "method null"),
        ('{"method": "eagle3", "num_speculative_tokens": 4}', 'method eagle3 needs one, as "model"'),
        ('{"method": "medusa", "num_speculative_tokens": 4}', 'use "mtp" if the model has'),
        (
            '{"method": "dflash", "model": "z/head", "num_speculative_tokens": 4}',
            '"dflash": of the heads that read',
        ),
        (
            '{"method": "lookahead", "num_speculative_tokens": 4}',
            '"lookahead" is not supported; choose "mtp", "draft_model"',
        ),
        (
            '{"method": "mtp", "disable_by_batch_size": 8}',
            "disable_by_batch_size 8: leave it out: the number",
        ),
        ('{"method": "mtp", "acceptance_method": "typical_acceptance_sampler"}', "a draft is kept only if"),
        (
            '{"model": "x", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}',
            "whole where the large",
        ),
        ('{"model": "x", "num_speculative_tokens": 4, "draft_tensor_parallel_size": true}', "size true"),
        ('{"model": "x", "num_speculative_tokens": 4, "max_model_len": 2048}', "--max-model-len"),
        (
            '{"model": "x", "num_speculative_tokens": 4, "quantization": "fp8"}',
            'quantization "fp8": leave it',
        ),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 8}', "prompt_lookup_min"),
        ('{"method": "mtp", "num_speculative_tokens": 4, "lookahead": 1}', "lookahead: no such field"),
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


@pytest.mark.parametrize(
    ("value", "drafts"),
    [
        ('{"method": "mtp"}', Drafts("mtp", 3, None)),
        ('{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', Drafts("mtp", 2, None)),
        ('{"method": "ngram_gpu", "num_speculative_tokens": 4}', Drafts("ngram", 4, Lookup(3, 16))),
        ('{"model": "[ngram]", "num_speculative_tokens": 4}', Drafts("ngram", 4, Lookup(3, 16))),
        ('{"method": "suffix"}', Drafts("ngram", 16, Lookup(3, 16))),
        ('{"method": "suffix", "num_speculative_tokens": 8}', Drafts("ngram", 8, Lookup(3, 16))),
        (
            '{"method": "ngram", "model": null, "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
            '"prompt_lookup_min": null, "draft_tensor_parallel_size": 1, "quantization": null, '
            '"rejection_sample_method": "standard", "disable_padded_drafter_batch": false, "revision": null}',
            Drafts("ngram", 4, Lookup(5, 5)),
        ),
    ],
)
def test_as_vllms_users_write_it(value: str, drafts: Drafts) -> None:
    """Other names of our methods, and fields with the values that they have anyway."""
    assert read(value) == drafts


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
