"""A model's file whose vocabulary has a family's tags, and whose chat template is of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moeserve.chatformat import solar_open
from tests.support.chats.family_templates import HARMONY, TEMPLATES
from tests.support.chats.kimi_k3_template import KIMI_K3
from tests.support.chats.solar_template import SOLAR
from tests.support.models.gguf_bytes import TOKEN_TYPES, TOKENS, gguf_bytes, model_metadata, model_tensors

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# The kinds that llama.cpp's converter gives these tokens.
_TAGS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "hermes": (_USER_DEFINED, ("<tool_call>", "</tool_call>")),
    "qwen3_coder": (_USER_DEFINED, ("<tool_call>", "</tool_call>")),
    "glm45": (
        _USER_DEFINED,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gemma4": (_USER_DEFINED, ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "minimax_m2": (_USER_DEFINED, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "minimax_m3": (_CONTROL, ("]<]minimax[>[", "<mm:think>", "</mm:think>", "]~b]")),
    "deepseek_v3": (
        _CONTROL,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "cohere": (
        _CONTROL,
        (
            *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            *("<|START_ACTION|>", "<|END_ACTION|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ),
    ),
    "kimi_k2": (
        _CONTROL,
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "mistral": (_CONTROL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "mistral_json": (_CONTROL, ("[TOOL_CALLS]",)),
    "granite": (_CONTROL, ("<|tool_call|>",)),
    "phi4_mini": (
        _CONTROL,
        ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
    ),
    "seed_oss": (_CONTROL, ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")),
    "hunyuan": (_USER_DEFINED, ("<tool_calls>", "</tool_calls>")),
    "nemotron": (_CONTROL, ("<TOOLCALL>", "</TOOLCALL>")),
    "llama": (_CONTROL, ("<|python_tag|>",)),
    "lfm2": (_CONTROL, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "solar_open": (_CONTROL, (*solar_open.WORDS, "<|tool_response|>")),
    "kimi_k3": (_CONTROL, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    "harmony": (
        _CONTROL,
        (
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
    ),
}
_HUNYUAN_3: Final = (
    *("tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep"),
    *("arg_key", "/arg_key", "arg_value", "/arg_value"),
)
_TAGS["hy_v3"] = _USER_DEFINED, tuple(f"<{tag}:opensource>" for tag in _HUNYUAN_3)
_TAGS["hy_v3_preview"] = _USER_DEFINED, tuple(f"<{tag}>" for tag in _HUNYUAN_3)
_TAGS["deepseek_v31"] = _TAGS["deepseek_v3"]
_TAGS["deepseek_v32"] = _TAGS["deepseek_v4"] = _CONTROL, ("｜DSML｜", "<｜Assistant｜>")


def write_family_model(name: str, to: Path) -> Path:
    """Writes a model of the format `name`, as --tool-call-parser has it; gives `to`."""
    kind, tags = _TAGS[name]
    tags = (*tags, "</think>")
    metadata = model_metadata(
        tokenizer__ggml__tokens=[*TOKENS, *tags],
        tokenizer__ggml__token_type=[*TOKEN_TYPES, *([kind] * (len(tags) - 1)), _USER_DEFINED],
        tokenizer__chat_template=(TEMPLATES | {"harmony": HARMONY, "kimi_k3": KIMI_K3, "solar_open": SOLAR})[
            name
        ],
    )
    to.write_bytes(gguf_bytes(metadata, model_tensors()))
    return to
