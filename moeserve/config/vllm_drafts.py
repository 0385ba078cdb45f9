"""Fields of vLLM's --speculative-config that moeserve does not have: methods under other names, unsupported methods,
and fields whose usual value changes nothing here."""

from __future__ import annotations

import json
from typing import Any, Final

_LOOKUP: Final = "ngram"
_BLOCK: Final = "mtp"
# The same under other names. vLLM also has the model's type in the name: "qwen3_next_mtp".
_OTHER_NAMES: Final = {"ngram_gpu": _LOOKUP, "suffix": _LOOKUP}
METHODS_WITHOUT_NUMBER: Final = {"suffix": 16}  # and how many tokens they draft at most
LOOKUP_MODELS: Final = ("ngram", "[ngram]")  # in place of a model's name, in early versions

_HEAD: Final = (
    "of the heads that read the model's hidden states, EAGLE-3's alone are supported: use "
    '"mtp" if the model has a next-token block, "draft_model" with a small model of the same vocabulary, or "ngram"'
)
_NOT_THERE: Final = {
    "eagle": _HEAD,
    "dflash": _HEAD,
    "dspark": _HEAD,
    "medusa": _HEAD,
    "mlp_speculator": _HEAD,
    "extract_hidden_states": "hidden states are not returned",
    "custom_class": "drafters of one's own cannot be loaded",
}

_FOLLOWS_LOAD: Final = (
    "leave it out: the number of drafts follows the load and what drafts bring, and may be none"
)
_IS_EXACT: Final = (
    "leave it out: a draft is kept only if it is the token that would have been sampled without drafts"
)
_OF_SERVER: Final = "leave it out: the small model has the server's"
_OF_FILE: Final = "leave it out: the small model runs whole where the large one does, by its file's format"
_OF_LOOKUP: Final = "leave it out: look-up takes prompt_lookup_min and prompt_lookup_max"
# Field -> the values that say nothing new, beside null; and the advice for others.
_FIELDS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "disable_by_batch_size": ((), _FOLLOWS_LOAD),
    "num_speculative_tokens_per_batch_size": ((), _FOLLOWS_LOAD),
    "enable_adaptive_verification": ((False,), _FOLLOWS_LOAD),
    "rejection_sample_method": (("standard", "strict", "block"), _IS_EXACT),
    "acceptance_method": (("rejection_sampler",), _IS_EXACT),
    "posterior_threshold": ((), _IS_EXACT),
    "posterior_alpha": ((), _IS_EXACT),
    "draft_sample_method": (("greedy", "probabilistic"), _IS_EXACT),
    "synthetic_acceptance_rates": (
        (),
        "leave it out: `moeserve bench engine --acceptance` forces acceptance",
    ),
    "synthetic_acceptance_length": (
        (),
        "leave it out: `moeserve bench engine --acceptance` forces acceptance",
    ),
    "disable_logprobs": ((False,), "leave it out: logprobs are those without drafts"),
    "draft_tensor_parallel_size": ((1,), _OF_FILE),
    "tensor_parallel_size": ((1,), _OF_FILE),
    "quantization": ((), _OF_FILE),
    "moe_backend": ((), _OF_FILE),
    "attention_backend": ((), _OF_FILE),
    "draft_load_config": ((), _OF_FILE),
    "enforce_eager": ((False, True), _OF_FILE),
    "kv_cache_dtype": (("auto",), f"{_OF_SERVER} --kv-cache-dtype"),
    "max_model_len": ((), f"{_OF_SERVER} --max-model-len"),
    "revision": (("main",), "leave it out: download that revision, and name its folder or file as the model"),
    "code_revision": (("main",), "leave it out: no code of a model is run"),
    "use_heterogeneous_vocab": ((False,), "leave it out: the small model needs the same vocabulary"),
    "parallel_drafting": ((False,), _HEAD),
    "disable_padded_drafter_batch": ((False, True), _OF_FILE),
    "disable_eagle_block_drop": ((False,), _HEAD),
    "use_local_argmax_reduction": ((False, True), _OF_FILE),
    "index_share_for_mtp_iteration": (
        (False,),
        "leave it out: the block's indexer chooses keys for each draft",
    ),
    "dspark_draft_topk": ((), _HEAD),
    "suffix_decoding_max_tree_depth": ((24,), _OF_LOOKUP),
    "suffix_decoding_max_cached_requests": ((10_000,), _OF_LOOKUP),
    "suffix_decoding_max_spec_factor": ((1.0,), _OF_LOOKUP),
    "suffix_decoding_min_token_prob": ((0.1,), _OF_LOOKUP),
}


def method_named(name: object) -> object:
    """Returns moeserve's name of vLLM's method; any other value unchanged. Raises ValueError for a method that is not
    there, with what to use instead."""
    if not isinstance(name, str):
        return name
    if name in _NOT_THERE:
        raise ValueError(f"method {json.dumps(name)}: {_NOT_THERE[name]}")
    if name.endswith("_mtp"):
        return _BLOCK
    return _OTHER_NAMES.get(name, name)


def without_usual_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the object without vLLM's fields whose value changes nothing here. Raises ValueError for another value,
    with advice."""
    left = {}
    for name, value in given.items():
        if name not in _FIELDS:
            left[name] = value
            continue
        usual, advice = _FIELDS[name]
        is_usual = value is None or any(type(value) is type(one) and value == one for one in usual)
        if not is_usual:
            raise ValueError(f"{name} {json.dumps(value)}: {advice}")
    return left
