"""Finds how the served model writes tool calls and reasoning, from the flags, its chat template and its vocabulary."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

from moeserve.chatformat import harmony, section_tags, solar_open
from moeserve.chatformat.formats import (
    TOOL_FORMATS,
    ToolFormat,
    has_sections,
    is_harmony,
    is_solar_open,
    tool_format,
)
from moeserve.chatformat.guided import GuidedCalls
from moeserve.chatformat.reasoning import REASONING_TAGS, reasoning_tags
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.spec import ArgumentTags, CallForm, Piece
from moeserve.httpserver.generation.chat import template_input
from moeserve.httpserver.generation.chat.channels import Channels
from moeserve.httpserver.generation.chat.sections import Sections
from moeserve.httpserver.generation.chat.solar_tokens import SolarTokens
from moeserve.httpserver.generation.chat.template_efforts import TemplateEfforts, efforts_of
from moeserve.httpserver.generation.chat.template_probe import fails_without_description, shapes_of
from moeserve.httpserver.generation.chat.template_shape import Conversation, Shapes, TemplateShape
from moeserve.httpserver.generation.chat.thinking_tokens import ThinkingTokens
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer

log = logging.getLogger(__name__)

# The values of the flags for formats of whole answers.
HARMONY: Final = "harmony"
KIMI_K3: Final = "kimi_k3"
SOLAR: Final = "solar_open"


@dataclass(frozen=True)
class ChatFormats:
    tools: ToolFormat | None = None
    thinking: ThinkingTokens | None = None
    call_form: CallForm | None = None  # how calls in JSON are written, for grammars that enforce calls
    own_form: CallForm | None = None  # the same with the arguments in the model's own tags
    # The control tokens that the format's parser reads as text: token ids by text.
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    # A token that occurs only in calls' opening tags; None: there is no such token.
    tool_open: int | None = None
    call_opening: tuple[
        int, ...
    ] = ()  # `tool_open` after the token before it in the tag; (): not one or two tokens
    call_end: int | None = None  # ends one call; None if that takes several tokens
    # The formats of gpt-oss, Kimi-K3 and Solar Open, which replace all the others.
    channels: Channels | None = None
    sections: Sections | None = None
    solar: SolarTokens | None = None
    shapes: Shapes = field(default_factory=Shapes)  # the template's shapes
    needs_descriptions: bool = False  # the template fails on a tool without a description
    efforts: TemplateEfforts = field(
        default_factory=TemplateEfforts
    )  # the template's words of reasoning effort

    @property
    def calls_tools(self) -> bool:
        return self.tools is not None or (self._whole is not None and self._whole.reads_calls)

    @property
    def thinks(self) -> bool:
        return self.thinking is not None or (self._whole is not None and self._whole.separates_reasoning)

    @property
    def _whole(self) -> Channels | Sections | SolarTokens | None:
        return self.channels or self.sections or self.solar

    @property
    def end_tags(self) -> dict[int, str]:
        """Returns the format's tokens that may end an answer, with their texts, which are not in the answer's text."""
        if self.channels is not None:
            return {self.channels.tokens[word]: word for word in (harmony.END, harmony.CALL, harmony.RETURN)}
        if self.solar is not None:
            return self.solar.end_tags
        return {} if self.tools is None or self.call_end is None else {self.call_end: self.tools.call_end}

    def names(self) -> tuple[str, str]:
        """Returns the names of the formats of tool calls and of reasoning, as values of the flags."""
        if self._whole is not None:
            name = HARMONY if self.channels else KIMI_K3 if self.sections else SOLAR
            return name if self.calls_tools else "none", name if self.thinks else "none"
        return "none" if self.tools is None else self.tools.name, (
            "none" if self.thinking is None else self.thinking.tags.name
        )

    def for_template(
        self, messages: Conversation, tools: list[dict[str, Any]] | None, template: str | None
    ) -> tuple[Conversation, list[dict[str, Any]] | None]:
        """Returns messages and tools in the form that the model's template expects."""
        if template is None:
            return messages, tools
        if tools and self._describes_tools(template):
            assert self.tools is not None
            messages = template_input.with_tools(messages, tools, self.tools.guided)
        if tools and (self.needs_descriptions or self.channels is not None):
            tools = template_input.described(tools)
        messages = (self.shapes.with_tools if tools else self.shapes.plain).fitted(messages)
        if self.channels is not None:
            return template_input.for_harmony(messages), tools
        if self.solar is not None:
            return template_input.with_ids(template_input.for_solar(messages), solar_open.call_id), tools
        if self.tools is not None and template_input.reads_tools_of_message(template):
            return template_input.with_tools_in_message(messages, tools, self.tools.guided), tools
        if self.tools is not None and self.tools.takes_text_arguments:
            messages = template_input.for_deepseek(messages, template)
        if self.tools is not None and self.tools.call_id is not None:
            messages = template_input.with_ids(messages, self.tools.call_id)
        return messages, tools

    def _describes_tools(self, template: str) -> bool:
        """True if the server must describe the tools to the model because the template does not."""
        is_plain_json = self.tools is not None and self.tools.guided_body is None
        return is_plain_json and not template_input.shows_tools(template)

    def probed(self, renderer: ChatRenderer) -> ChatFormats:
        """Returns the formats with the template's shapes and efforts added. Logs once the parts of conversations that
        the template cannot show."""

        def render(messages: Conversation, tools: list[dict[str, Any]] | None, shape: TemplateShape) -> str:
            formats = replace(self, shapes=Shapes(shape, shape))
            messages, tools = formats.for_template(messages, tools, renderer.source_for(tools))
            return renderer.render_now(messages, tools=tools)

        if renderer.source is None:
            return self
        shapes, missed = shapes_of(render)
        needs_descriptions = fails_without_description(render, shapes.with_tools)
        if needs_descriptions:
            missed.append("tools without a description (get an empty one)")
        if missed:
            log.info("messages are changed to suit the chat template: %s", "; ".join(missed))
        example = [{"role": "user", "content": "Hi"}]
        efforts = efforts_of(renderer.source, lambda kwargs: renderer.render_now(example, kwargs=kwargs))
        return replace(self, shapes=shapes, efforts=efforts, needs_descriptions=needs_descriptions)


def formats_of(config: ServerConfig, tokenizer: TextTokenizer, *templates: str) -> ChatFormats:
    """Returns the formats in which the model writes tool calls and reasoning. templates: the model's chat templates,
    the one for tools first. Raises ConfigError for a flag that does not fit the model's vocabulary."""
    in_channels = _whole_format(config, tokenizer, HARMONY, harmony.WORDS, any(map(is_harmony, templates)))
    if in_channels is not None:
        return ChatFormats(channels=Channels(*in_channels), control_tokens=in_channels[0])
    in_sections = _whole_format(
        config, tokenizer, KIMI_K3, section_tags.WORDS, any(map(has_sections, templates))
    )
    if in_sections is not None:
        return ChatFormats(sections=Sections(*in_sections), control_tokens=in_sections[0])
    in_messages = _whole_format(
        config, tokenizer, SOLAR, solar_open.WORDS, any(map(is_solar_open, templates))
    )
    if in_messages is not None:
        return ChatFormats(solar=SolarTokens(*in_messages), control_tokens=in_messages[0])
    flag = config.tool_call_parser
    found = filter(None, map(tool_format, templates))
    tools = next(found, None) if flag == "auto" else TOOL_FORMATS.get(flag)
    thinking = _thinking(config, tokenizer, templates)
    if tools is None:
        return ChatFormats(thinking=thinking)
    control = _control_tokens(tokenizer, tools.words)
    tool_open, call_end = (
        control.get(tag, _token(tokenizer, tag)) for tag in (tools.opening or tools.tags.open, tools.call_end)
    )
    own = None if tools.own_calls is None else _call_form(tools.own_calls, control)
    before = tools.tags.open.partition(tools.opening)[0] if tools.opening else ""
    call_opening = [*tokenizer.encode(before), *(() if tool_open is None else (tool_open,))]
    return ChatFormats(
        tools,
        thinking,
        _call_form(tools.guided, control),
        own,
        control,
        tool_open,
        tuple(call_opening) if tool_open is not None and len(call_opening) <= 2 else (),
        call_end,
    )


def _whole_format(
    config: ServerConfig, tokenizer: TextTokenizer, name: str, words: Sequence[str], is_templates: bool
) -> tuple[dict[str, int], bool, bool] | None:
    """Returns the control tokens of a format of whole answers by text, and whether it covers calls and reasoning; None
    if the model does not have the format. is_templates: the chat template asks for it. Raises ConfigError."""
    tool_flag, reasoning_flag = config.tool_call_parser, config.reasoning_parser
    is_named = name in (tool_flag, reasoning_flag)
    if not is_named and not ("auto" in (tool_flag, reasoning_flag) and is_templates):
        return None
    tokens = {word: ids[0] for word in words if len(ids := tokenizer.encode(word)) == 1}
    if len(tokens) < len(words):
        if not is_named:
            return None
        missing = ", ".join(word for word in words if word not in tokens)
        flag = "--tool-call-parser" if tool_flag == name else "--reasoning-parser"
        raise ConfigError(f"{flag} {name}: the model's vocabulary has no tokens {missing}")
    return tokens, tool_flag in ("auto", name), reasoning_flag in ("auto", name)


def _call_form(guided: GuidedCalls, control: Mapping[str, int]) -> CallForm:
    def pieces(text: str) -> list[Piece]:
        parts = re.split("(" + "|".join(map(re.escape, control)) + ")", text) if control else [text]
        return [control.get(part, part) for part in parts if part]

    (opening,) = pieces(guided.open)
    return CallForm(
        opening,
        pieces(guided.before_name),
        pieces(guided.before_arguments),
        pieces(guided.behind),
        pieces(guided.close),
        pieces(guided.separator),
        guided.is_block,
        None if guided.tags is None else ArgumentTags(*astuple(guided.tags)),
        guided.numbered,
    )


def _thinking(
    config: ServerConfig, tokenizer: TextTokenizer, templates: Sequence[str]
) -> ThinkingTokens | None:
    flag = config.reasoning_parser
    found = filter(None, map(reasoning_tags, templates))
    tags = next(found, None) if flag == "auto" else REASONING_TAGS.get(flag)
    if tags is None:
        return None
    open_id, close_id = _token(tokenizer, tags.open_token), _token(tokenizer, tags.close)
    if open_id is None or close_id is None:
        if flag == "auto":
            return None
        raise ConfigError(
            f"--reasoning-parser {flag}: the model's vocabulary lacks the token {tags.open_token} or {tags.close}, or "
            "has it as a control token; leave the flag out, or name the format that the model was trained with"
        )
    return ThinkingTokens(open_id, close_id, tuple(tokenizer.encode_rest(tags.ending)), tags)


def _control_tokens(tokenizer: TextTokenizer, words: Sequence[str]) -> dict[str, int]:
    """Returns the token ids of the words that are control tokens. Detokenised text omits control tokens by default."""
    special = tokenizer.vocabulary.special
    encoded = {word: tokenizer.encode(word) for word in words}
    return {word: ids[0] for word, ids in encoded.items() if len(ids) == 1 and ids[0] in special}


def _token(tokenizer: TextTokenizer, tag: str) -> int | None:
    """Returns the tag's single token; None if the tag takes several tokens or is a control token, which detokenised
    text omits."""
    ids = tokenizer.encode(tag)
    return ids[0] if len(ids) == 1 and ids[0] not in tokenizer.vocabulary.special else None
