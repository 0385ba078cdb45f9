"""Fields of other servers' completion and chat APIs that moeserve does not support.

Sources: vLLM's `protocol.py`, SGLang's `protocol.py`, llama-server's README and `server-task.cpp`, of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moeserve.httpserver.transport.request_model import UnsupportedField

_UNUSED: Final = UnsupportedField()  # refused unless empty
_OFF: Final = UnsupportedField((False,))

# Fields that do not change the answer: hints for a cache or a scheduler, labels, and details of features that are off.
IDLE: Final = frozenset(
    {
        *("adaptive_decay", "backend_sampling", "cache_prompt", "dynatemp_exponent", "id_slot"),
        *(
            "mirostat_eta",
            "mirostat_tau",
            "n_cache_reuse",
            "request_id",
            "rid",
            "session_id",
        ),
        *("spaces_between_special_tokens", "sse_ping_interval", "stream_interval", "truncation_side"),
        *("repeat_last_n", "timings_per_token", "custom_labels", "routed_dp_rank", "data_parallel_rank"),
    }
)
SHARED: Final[Mapping[str, UnsupportedField]] = {
    "adaptive_target": UnsupportedField((-1,)),
    "bootstrap_host": _UNUSED,
    "bootstrap_port": _UNUSED,
    "bootstrap_room": _UNUSED,
    "chat_format": _UNUSED,
    "custom_logit_processor": _UNUSED,
    "custom_params": _UNUSED,
    "disagg_prefill_dp_rank": _UNUSED,
    "dynatemp_range": UnsupportedField((0,)),
    "ec_transfer_params": _UNUSED,
    "extra_key": UnsupportedField((), "cache_salt"),
    "grammar_lazy": _OFF,
    "grammar_triggers": _UNUSED,
    "images_config": _UNUSED,
    "kv_transfer_params": _UNUSED,
    "logits_processors": _UNUSED,
    "logprob_token_ids": _UNUSED,
    "lora": _UNUSED,
    "lora_path": _UNUSED,
    "min_keep": UnsupportedField((0,)),
    "mirostat": UnsupportedField((0,)),
    "n_cmpl": UnsupportedField((), "n"),
    "n_discard": UnsupportedField((0,)),
    "n_indent": UnsupportedField((0,)),
    "n_keep": UnsupportedField((0, -1)),
    "n_predict": UnsupportedField((), "max_tokens"),
    "n_probs": UnsupportedField((0,), "logprobs"),
    "ngram_corpus_id": _UNUSED,
    "post_sampling_probs": _OFF,
    "preserved_tokens": _UNUSED,
    "reasoning_budget_end_tag": _UNUSED,
    "reasoning_budget_message": _UNUSED,
    "reasoning_budget_start_tag": _UNUSED,
    "reasoning_budget_tokens": UnsupportedField((-1,), "thinking_token_budget"),
    "reasoning_in_content": _OFF,
    "repeat_penalty": UnsupportedField((1,), "repetition_penalty"),
    "repetition_detection": _UNUSED,
    "response_fields": _UNUSED,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_mm_kwargs": _OFF,
    "return_routed_experts": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens": _OFF,
    "routed_experts_prompt_start": _UNUSED,
    "routed_experts_start_len": _UNUSED,
    "session_params": _UNUSED,
    "stop_regex": UnsupportedField((), "stop"),
    "t_max_predict_ms": UnsupportedField((0, -1)),
    "vllm_xargs": _UNUSED,
    "watermarking": _OFF,
}
CHAT: Final[Mapping[str, UnsupportedField]] = {
    **SHARED,
    "add_special_tokens": _OFF,
    "best_of": UnsupportedField((1,), "n"),
    "chat_template": UnsupportedField((), "the flag --chat-template"),
    "documents": _UNUSED,
    "echo": _OFF,
    "input_ids": _UNUSED,
    "media_io_kwargs": _UNUSED,
    "mm_processor_kwargs": _UNUSED,
    "reasoning_control": _OFF,
    "reasoning_format": UnsupportedField(("auto", "deepseek"), "--reasoning-parser"),
    "return_meta_info": _OFF,
    "return_prompt_text": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_token_ids": _OFF,
    "suffix": _UNUSED,
    "task": _UNUSED,
    "thinking_budget_tokens": UnsupportedField((-1,), "thinking_token_budget"),
    "use_audio_in_video": _OFF,
}
CHAT_IDLE: Final = IDLE | {"max_dynamic_patch", "min_dynamic_patch", "stream_reasoning", "verbosity"}
COMPLETION: Final[Mapping[str, UnsupportedField]] = {
    **SHARED,
    "add_special_tokens": UnsupportedField((True,)),
    "prompt_embeds": _UNUSED,
    "thinking_token_budget": UnsupportedField((-1,)),
}
