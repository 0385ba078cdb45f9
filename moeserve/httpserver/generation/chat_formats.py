"""How the served model writes tool calls and thinking: from the flags, its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeserve.chatformat import detect, reasoning, tool_calls
from moeserve.chatformat.hermes import HermesBody
from moeserve.chatformat.qwen3_coder import FUNCTION, Qwen3CoderBody
from moeserve.chatformat.tool_calls import ToolCallParser
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.generation.thinking import ThinkingTokens
from moeserve.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class ChatFormats:
    tools: detect.ToolFormat | None
    thinking: ThinkingTokens | None
    tool_open: int | None  # `<tool_call>` and `</tool_call>`; None if a tag takes several tokens
    tool_close: int | None

    def tool_parser(self, schemas: Mapping[str, Mapping[str, Any]], is_constrained: bool) -> ToolCallParser:
        """`schemas` are those of the tools' arguments, by tool. Constrained answers use the Hermes format whatever the
        model's own, because its arguments are JSON."""
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
    return ChatFormats(tools, _thinking(config, tokenizer, template), tool_open, tool_close)


def _named(flag: str) -> detect.ToolFormat | None:
    return None if flag == "none" else "hermes" if flag == "hermes" else "qwen3_coder"


def _thinking(config: ServerConfig, tokenizer: TextTokenizer, template: str) -> ThinkingTokens | None:
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
    return ThinkingTokens(open_id, close_id, tuple(tokenizer.encode(f"\n{reasoning.CLOSE}\n\n")))


def _token(tokenizer: TextTokenizer, tag: str) -> int | None:
    """Returns the tag's single token; None if it takes several, or is a control token, which the text leaves out."""
    ids = tokenizer.encode(tag)
    return ids[0] if len(ids) == 1 and ids[0] not in tokenizer.vocabulary.special else None
