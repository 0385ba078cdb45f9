"""Drafts: what `--speculative-config` and `--speculative-model` say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from moeserve.config.api_config import ApiConfig
from moeserve.config.option import option
from moeserve.config.vllm_drafts import (
    LOOKUP_MODELS,
    METHODS_WITHOUT_NUMBER,
    method_named,
    without_usual_fields,
)

MOST_DRAFTS: Final = 16
LONGEST_MATCH: Final = 64
_DEFAULT_SHORTEST: Final = 3
_DEFAULT_LONGEST: Final = 16
_DEFAULT_DRAFTS: Final = 5  # of --speculative-model alone
_DEFAULT_OF_BLOCK: Final = 3
_LOOKUP_FIELDS: Final = ("prompt_lookup_min", "prompt_lookup_max")
DraftMethod = Literal["ngram", "mtp", "draft_model", "eagle3", "auto"]
# Methods that take a model, or may.
_WITH_MODEL: Final = ("draft_model", "eagle3", "auto")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(ApiConfig):
    """The options of speculative decoding, as fields of the configuration."""

    speculative_config: str | None = option(
        None,
        "Model",
        "speculative decoding: cheap drafts of the next tokens, which a single step verifies together, so that answers "
        'come faster and stay the same. In vLLM\'s JSON form: {"method": "mtp", "num_speculative_tokens": 3} drafts '
        f"up to 3 tokens a step. num_speculative_tokens: at most {MOST_DRAFTS}; default: {_DEFAULT_OF_BLOCK} for mtp, "
        f"{_DEFAULT_DRAFTS} with --speculative-model; otherwise required. Methods: mtp: the model's "
        'own MTP block drafts; draft_model: the small model in "model" drafts (see --speculative-model); eagle3: the '
        f'EAGLE-3 head in "model" drafts; ngram: looks for the text\'s last {_DEFAULT_SHORTEST} to {_DEFAULT_LONGEST} '
        'tokens ("prompt_lookup_min", "prompt_lookup_max") earlier in it, and drafts what followed them; auto: ngram, '
        "and where nothing earlier agrees, the small model, the EAGLE-3 head or the MTP block, whichever there is. Not "
        "with several GPUs, --debug-dump or --record-routing-trace; on a GPU, not for DeepSeek V4 and models with "
        "n-gram embeddings, and some methods not for some models (the error says which) (default: no drafts)",
        metavar="JSON",
    )
    speculative_model: str | None = option(
        None,
        "Model",
        "model that drafts tokens for speculative decoding: a small model with the same vocabulary, or the model's "
        "EAGLE-3 head; on the CPU or one GPU, where the model is. Answers come faster and stay the same. A .gguf file, "
        "a folder or a name on the hub, as for --model. Without "
        f"--speculative-config it drafts up to {_DEFAULT_DRAFTS} tokens a step. It is refused where "
        "--speculative-config is, and on a GPU if some of the model's layers are in RAM; some small models and heads "
        "draft only on the CPU (the error says which) (default: none)",
        metavar="MODEL",
    )


_Config = TypeVar("_Config", bound=SpeculativeConfig)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Drafting by look-up: what followed the last tokens earlier in the text."""

    shortest: int  # tokens that must agree
    longest: int  # beyond which more of them make no difference


@dataclass(frozen=True, slots=True)
class Drafts:
    method: DraftMethod
    num_speculative_tokens: int  # most drafts of a row
    lookup: Lookup | None  # None: the model's block or the small model alone drafts
    model: str | None = None  # the small model or the EAGLE-3 head that drafts; None: there is none

    @property
    def block_method(self) -> DraftMethod | None:
        """Returns the method by which the model's own block drafts; None if a small model replaces the block."""
        return self.method if self.model is None else None


def drafts_of(config: SpeculativeConfig) -> Drafts | None:
    """Returns the drafts that --speculative-config and --speculative-model ask for; None if they ask for none. Raises
    ValueError, whose text names the field and the remedy."""
    if config.speculative_config is None:
        if config.speculative_model is None:
            return None
        return Drafts("draft_model", _DEFAULT_DRAFTS, None, config.speculative_model)
    try:
        given = json.loads(config.speculative_config)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError('write a JSON object, as {"method": "ngram", "num_speculative_tokens": 4}')
    given = without_usual_fields({name: value for name, value in given.items() if value is not None})
    if "method" not in given and given.get("model") in LOOKUP_MODELS:
        given["method"] = given.pop("model").strip("[]")
    name = given.pop("method", None)
    model = _model(given, config.speculative_model)
    # As in vLLM, a model without a method is a small model that drafts.
    method = _method("draft_model" if name is None and model is not None else method_named(name))
    if model is not None and method not in _WITH_MODEL:
        raise ValueError(
            f"method {method} takes no model that drafts: leave the model out, or say draft_model or auto"
        )
    if model is None and method in ("draft_model", "eagle3"):
        raise ValueError(
            f'model: method {method} needs one, as "model": "small.gguf", or --speculative-model'
        )
    has_lookup = method in ("ngram", "auto")
    names = ("num_speculative_tokens", *(_LOOKUP_FIELDS if has_lookup else ()))
    if unknown := given.keys() - set(names):
        raise ValueError(f"{min(unknown)}: no such field here; method, {', '.join(names)}")
    default = None if config.speculative_model is None else _DEFAULT_DRAFTS
    if name in METHODS_WITHOUT_NUMBER:
        default = METHODS_WITHOUT_NUMBER[name]
    elif method == "mtp":
        default = _DEFAULT_OF_BLOCK
    tokens = _count(given, "num_speculative_tokens", default, MOST_DRAFTS)
    return Drafts(method, tokens, _lookup(given) if has_lookup else None, model)


def with_draft_model(config: _Config, path: str) -> _Config:
    """Returns the same, with the small model at `path` named by the flag alone."""
    if config.speculative_config is None:
        return replace(config, speculative_model=path)
    given = {"method": "draft_model"} | json.loads(config.speculative_config)
    given.pop("model", None)
    return replace(config, speculative_model=path, speculative_config=json.dumps(given))


def num_drafts(config: SpeculativeConfig) -> int:
    """Returns the most drafts per row; 0: no drafts. Raises ValueError as above."""
    drafts = drafts_of(config)
    return 0 if drafts is None else drafts.num_speculative_tokens


def _model(given: dict[str, Any], flag: str | None) -> str | None:
    """Takes the small model from the JSON or the flag."""
    model = given.pop("model", flag)
    if model is not None and (not isinstance(model, str) or not model):
        raise ValueError(f"model: a file, a folder or a name on the hub wanted, not {json.dumps(model)}")
    if flag is not None and model != flag:
        raise ValueError(f"model {model} is not the one of --speculative-model {flag}: leave one of them out")
    return model


def _method(name: object) -> DraftMethod:
    if name == "ngram" or name == "auto" or name == "draft_model" or name == "mtp" or name == "eagle3":
        return name
    raise ValueError(
        f'method {json.dumps(name)} is not supported; choose "mtp", "draft_model", "eagle3", "ngram" or "auto"'
    )


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
        raise ValueError(
            f"{name} is {json.dumps(value)}; write a whole number from 1 to {most}, without quotes"
        )
    return value
