"""Drafts: what `--speculative-config` says."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

from moeserve.config.api_config import ApiConfig
from moeserve.config.option import option

MOST_DRAFTS: Final = 16
LONGEST_MATCH: Final = 64
_DEFAULT_SHORTEST: Final = 3
_DEFAULT_LONGEST: Final = 8


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(ApiConfig):
    """The option's field."""

    speculative_config: str | None = option(
        None,
        "Model",
        'speculative decoding, in vLLM\'s JSON form: {"method": "ngram", "num_speculative_tokens": 4} drafts up to 4 '
        'tokens from an earlier place of the text where the last "prompt_lookup_min" to "prompt_lookup_max" tokens (3 '
        "to 8) are the same, and verifies them in one step; the text stays the same (CPU only; default: no drafts)",
        metavar="JSON",
    )


@dataclass(frozen=True, slots=True)
class NgramDrafts:
    """Drafts by look-up in the request's own tokens."""

    num_speculative_tokens: int  # most drafts of a row
    prompt_lookup_min: int  # tokens that must agree
    prompt_lookup_max: int  # beyond which more of them make no difference


def drafts_of(config: SpeculativeConfig) -> NgramDrafts | None:
    """None: there are no drafts. Raises ValueError, whose text names the field and the remedy."""
    if config.speculative_config is None:
        return None
    try:
        given = json.loads(config.speculative_config)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError('expected a JSON object, as {"method": "ngram", "num_speculative_tokens": 4}')
    method = given.pop("method", None)
    if method != "ngram":
        raise ValueError(f'method {json.dumps(method)}: only "ngram" is supported so far')
    names = [field.name for field in fields(NgramDrafts)]
    if unknown := given.keys() - set(names):
        raise ValueError(f"{min(unknown)}: no such field here; method, {', '.join(names)}")
    tokens = _count(given, "num_speculative_tokens", None, MOST_DRAFTS)
    # As in vLLM, one of the two alone is both.
    if given.keys() & {"prompt_lookup_min", "prompt_lookup_max"}:
        ends = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        given["prompt_lookup_min"] = ends[1] if ends[0] is None else ends[0]
        given["prompt_lookup_max"] = ends[0] if ends[1] is None else ends[1]
    shortest = _count(given, "prompt_lookup_min", _DEFAULT_SHORTEST, LONGEST_MATCH)
    longest = _count(given, "prompt_lookup_max", _DEFAULT_LONGEST, LONGEST_MATCH)
    if longest < shortest:
        raise ValueError(f"prompt_lookup_max {longest} is less than prompt_lookup_min {shortest}")
    return NgramDrafts(tokens, shortest, longest)


def num_drafts(config: SpeculativeConfig) -> int:
    """Most drafts of a row; 0: there are none. Raises ValueError as above."""
    drafts = drafts_of(config)
    return 0 if drafts is None else drafts.num_speculative_tokens


def _count(given: dict[str, Any], name: str, default: int | None, most: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}: a whole number from 1 to {most} wanted, not {json.dumps(value)}")
    return value
