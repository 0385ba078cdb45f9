"""How the served model writes tool calls and thoughts: from the flags, its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.chatformat import detect, reasoning, tool_calls
from moeserve.chatformat.hermes import HermesBody
from moeserve.chatformat.qwen3_coder import FUNCTION, Qwen3CoderBody
from moeserve.chatformat.tool_calls import ToolCallParser
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.schema import Thinking
from moeserve.tokenizer.text_tokenizer import TextTokenizer

# Closed: the prompt has ended the thought, or forbids one. Possible: the model may open one.
ThoughtState = Literal["closed", "open", "possible"]


@dataclass(frozen=True)
class Thought:
    """What is asked of the thought before the answer. `is_enabled` None: as the template has it."""

    is_enabled: bool | None = None
    budget: int | None = None  # tokens
    param: str = "thinking_token_budget"


@dataclass(frozen=True)
class ThoughtTokens:
    open: int
    close: int
    ending: tuple[int, ...]  # how a thought that is cut short ends: as the template writes it

    def state(self, prompt: Sequence[int], special: frozenset[int]) -> ThoughtState:
        """Whether the answer to this prompt begins within a thought. Only the turn that the prompt opens counts:
        what follows its last control token."""
        for token_id in reversed(prompt):
            if token_id == self.close:
                return "closed"
            if token_id == self.open:
                return "open"
            if token_id in special:
                break
        return "possible"

    def thinking(self, is_open: bool, budget: int | None) -> Thinking:
        return Thinking(self.open, self.close, self.ending, is_open, budget)


@dataclass(frozen=True)
class ChatFormats:
    tools: detect.ToolFormat | None
    thought: ThoughtTokens | None
    tool_open: int | None  # `<tool_call>` and `</tool_call>`, where each is one token
    tool_close: int | None

    def tool_parser(self, schemas: Mapping[str, Mapping[str, Any]], is_constrained: bool) -> ToolCallParser:
        """`schemas` are the arguments' by tool. What a grammar constrains is written in the Hermes format,
        whatever the model's own: its arguments are JSON already."""
        if is_constrained or self.tools == "hermes":
            return ToolCallParser(HermesBody)
        return ToolCallParser(lambda index: Qwen3CoderBody(index, schemas), FUNCTION)


def formats_of(config: ServerConfig, tokenizer: TextTokenizer, template: str | None) -> ChatFormats:
    """Raises ConfigError for a flag that the model's vocabulary does not allow."""
    template = template or ""
    tools = (
        detect.tool_format(template) if config.tool_call_parser == "auto" else _named(config.tool_call_parser)
    )
    tool_open, tool_close = (_token(tokenizer, tag) for tag in (tool_calls.OPEN, tool_calls.CLOSE))
    return ChatFormats(tools, _thought(config, tokenizer, template), tool_open, tool_close)


def _named(flag: str) -> detect.ToolFormat | None:
    return None if flag == "none" else "hermes" if flag == "hermes" else "qwen3_coder"


def _thought(config: ServerConfig, tokenizer: TextTokenizer, template: str) -> ThoughtTokens | None:
    flag = config.reasoning_parser
    if flag == "none" or (flag == "auto" and not detect.thinks(template)):
        return None
    open_id, close_id = _token(tokenizer, reasoning.OPEN), _token(tokenizer, reasoning.CLOSE)
    if open_id is None or close_id is None:
        if flag == "auto":
            return None
        raise ConfigError(
            f"--reasoning-parser {flag}: the model's vocabulary has no tokens {reasoning.OPEN} and {reasoning.CLOSE} "
            "that are part of its text"
        )
    return ThoughtTokens(open_id, close_id, tuple(tokenizer.encode(f"\n{reasoning.CLOSE}\n\n")))


def _token(tokenizer: TextTokenizer, tag: str) -> int | None:
    """The token that the tag is, unless it is left out of the text as control tokens are."""
    ids = tokenizer.encode(tag)
    return ids[0] if len(ids) == 1 and ids[0] not in tokenizer.vocabulary.special else None
