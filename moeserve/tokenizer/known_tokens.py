"""Tokens that are known by their text, whatever kind a file gives them.

Converters have written control tokens as normal ones, which neither end an answer nor are matched whole in a prompt,
and thinking tags as control tokens, which no text shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from moeserve.chatformat import dsml, harmony, section_tags
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.reasoning import REASONING_TAGS

# tokenizer.ggml.token_type
NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

# Ends of a turn, which end an answer though no file may name them: those of ChatML and Llama; of gpt-oss, where an
# answer ends and where it calls a tool; of GLM, where the user or a tool would speak; of Gemma 4, where a turn ends and
# where a tool's result would come; MiniMax's and others'.
TURN_ENDS: Final = (
    *("<|im_end|>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>", "<turn|>", "<|tool_response>"),
    *("<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "[e~[", "<|flush|>", "<|calls|>", "<end_of_utterance>"),
    *("<|END_OF_TURN_TOKEN|>", "<|end_of_msg|>"),
)
# Ends of a text: they end an answer unless generation_config.json names others.
TEXT_ENDS: Final = (
    *(
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "<eos>",
        "[EOS]",
        "[EOT]",
        "<EOT>",
        "_<EOT>",
    ),
)
_MESSAGE_ENDS: Final = (
    harmony.RETURN,
    "<|flush|>",
)  # with one of them, harmony.END ends a message of several
_OTHER_CONTROLS: Final = (
    *("<|im_start|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),  # ChatML, Kimi
    *("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),  # GLM
    *("<bos>", "<|turn>", "<start_of_turn>"),  # Gemma
    *("]~!b[", "]~b]"),  # MiniMax
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),  # DeepSeek
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),  # Llama
    *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),  # Cohere
    *("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Cohere, around an answer
)
# A model's thinking is between them, and its text has them.
_THINKING: Final = tuple(
    dict.fromkeys(tag for tags in REASONING_TAGS.values() for tag in (tags.open_token, tags.close))
)
# Around tool calls. Many files have them as control tokens, which the chat formats take into account.
_TOOLS: Final = frozenset(
    word.encode()
    for tools in TOOL_FORMATS.values()
    for word in ("<tool_response>", "</tool_response>", *tools.words)
    if word.startswith("<")
)
_CONTROLS: Final = (*TURN_ENDS, *TEXT_ENDS, *_OTHER_CONTROLS, *harmony.WORDS, *section_tags.WORDS)
_KINDS: Final[Mapping[bytes, int]] = {tag.encode(): USER_DEFINED for tag in (*_THINKING, dsml.MARK)} | {
    **dict.fromkeys(_TOOLS, USER_DEFINED),
    **{token.encode(): CONTROL for token in _CONTROLS},
}


def known_kinds(tokens: Iterable[bytes], kinds: Sequence[int]) -> dict[int, int]:
    """Returns the kinds, by token id, that differ from those of a file."""
    return {
        token_id: _KINDS[piece]
        for token_id, piece in enumerate(tokens)
        if piece in _KINDS
        and kinds[token_id] != _KINDS[piece]
        and not (piece in _TOOLS and kinds[token_id] == CONTROL)
    }


def turn_ends(controls: Mapping[str, int]) -> list[str]:
    """Returns the control tokens of a vocabulary that end a turn."""
    found = [piece for piece in TURN_ENDS if piece in controls]
    if harmony.END in controls and not any(piece in controls for piece in _MESSAGE_ENDS):
        found.append(harmony.END)
    return found
