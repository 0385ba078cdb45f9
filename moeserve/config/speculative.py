"""Drafts: what `--speculative-config` says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from moeserve.config.api_config import ApiConfig
from moeserve.config.option import option

MOST_DRAFTS: Final = 16
LONGEST_MATCH: Final = 64
_DEFAULT_SHORTEST: Final = 3
_DEFAULT_LONGEST: Final = 16
_LOOKUP_FIELDS: Final = ("prompt_lookup_min", "prompt_lookup_max")
DraftMethod = Literal["ngram", "mtp", "auto"]


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(ApiConfig):
    """The option's field."""

    speculative_config: str | None = option(
        None,
        "Model",
        'speculative decoding, in vLLM\'s JSON form: {"method": "mtp", "num_speculative_tokens": 3} drafts up to 3 '
        "tokens, which the next step verifies, so that answers stay the same. mtp: by the model's own next-token block "
        '(CPU only); ngram: copied from an earlier place in the text where the last "prompt_lookup_min" to '
        '"prompt_lookup_max" tokens (default: 3 to 16) are the same; auto: by both, or by ngram if the file has no '
        "such block (default: no drafts)",
        metavar="JSON",
    )


@dataclass(frozen=True, slots=True)
class Lookup:
    """Drafts from earlier places of the text."""

    shortest: int  # tokens that must agree
    longest: int  # beyond which more of them make no difference


@dataclass(frozen=True, slots=True)
class Drafts:
    method: DraftMethod
    num_speculative_tokens: int  # most drafts of a row
    lookup: Lookup | None  # None: the model's block alone drafts


def drafts_of(config: SpeculativeConfig) -> Drafts | None:
    """None: there are no drafts. Raises ValueError, whose text names the field and the remedy."""
    if config.speculative_config is None:
        return None
    try:
        given = json.loads(config.speculative_config)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError('expected a JSON object, as {"method": "ngram", "num_speculative_tokens": 4}')
    method = _method(given.pop("method", None))
    names = ("num_speculative_tokens", *(() if method == "mtp" else _LOOKUP_FIELDS))
    if unknown := given.keys() - set(names):
        raise ValueError(f"{min(unknown)}: no such field here; method, {', '.join(names)}")
    tokens = _count(given, "num_speculative_tokens", None, MOST_DRAFTS)
    return Drafts(method, tokens, None if method == "mtp" else _lookup(given))


def num_drafts(config: SpeculativeConfig) -> int:
    """Most drafts of a row; 0: there are none. Raises ValueError as above."""
    drafts = drafts_of(config)
    return 0 if drafts is None else drafts.num_speculative_tokens


def _method(name: object) -> DraftMethod:
    if name == "ngram" or name == "auto":
        return name
    # vLLM has the model's type in the name, too: "qwen3_next_mtp".
    if isinstance(name, str) and (name == "mtp" or name.endswith("_mtp")):
        return "mtp"
    raise ValueError(f'method {json.dumps(name)}: "mtp", "ngram" and "auto" are supported')


def _lookup(given: dict[str, Any]) -> Lookup:
    # As in vLLM, one of the two alone is both.
    if given.keys() & set(_LOOKUP_FIELDS):
        ends = [given.get(name) for name in _LOOKUP_FIELDS]
        given = given | dict(
            zip(
                _LOOKUP_FIELDS,
                (ends[1] if ends[0] is None else ends[0], ends[0] if ends[1] is None else ends[1]),
                strict=True,
            )
        )
    shortest = _count(given, "prompt_lookup_min", _DEFAULT_SHORTEST, LONGEST_MATCH)
    longest = _count(given, "prompt_lookup_max", _DEFAULT_LONGEST, LONGEST_MATCH)
    if longest < shortest:
        raise ValueError(f"prompt_lookup_max {longest} is less than prompt_lookup_min {shortest}")
    return Lookup(shortest, longest)


def _count(given: dict[str, Any], name: str, default: int | None, most: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}: a whole number from 1 to {most} wanted, not {json.dumps(value)}")
    return value
