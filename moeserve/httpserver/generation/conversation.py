"""From a conversation, whichever API it came through, to requests for the engine and readers for their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from moeserve.chatformat.reasoning import ReasoningParser
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.answers import AnswerReader
from moeserve.httpserver.generation.chat_formats import ChatFormats, Thought, ThoughtState
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.generation.structured_output import Constraint, constrain
from moeserve.httpserver.generation.tool_use import ToolUse
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.transport.errors import invalid
from moeserve.messages.schema import GenerateRequest, TextItem

_NEVER: Final = -100.0  # a logit bias that no token survives


@dataclass(frozen=True)
class Conversation:
    model: str | None
    messages: list[dict[str, Any]]  # as templates take them
    wish: Wish
    tools: ToolUse = field(default_factory=ToolUse)
    thought: Thought = field(default_factory=Thought)
    constraint: Constraint | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    show_reasoning: bool = True


@dataclass(frozen=True)
class Plan:
    """What is sent to the engine, and how each choice's items are read."""

    text: ModelText
    requests: list[GenerateRequest]
    readers: list[AnswerReader]
    tally: UsageTally
    stop_token_ids: tuple[int, ...]  # the client's own

    def stop_reason(self, end: TextItem) -> str | int | None:
        """The client's stop string or token; not the tag that ends the only call there may be."""
        is_tag = end.stop_reason is not None and end.stop_reason == self.text.formats.tool_close
        return None if is_tag and end.stop_reason not in self.stop_token_ids else end.stop_reason


async def prompt_of(text: ModelText, limit: int, chat: Conversation) -> list[int]:
    """The conversation as token ids. Raises ApiError 400."""
    if chat.tools.may_call and text.formats.tools is None:
        message = "this model's chat template shows no way to call tools (see --tool-call-parser)"
        raise invalid(chat.tools.param, message)
    kwargs = dict(chat.template_kwargs)
    if chat.thought.is_enabled is not None:
        kwargs["enable_thinking"] = chat.thought.is_enabled
    return await text.encode_chat(
        chat.messages,
        tools=[tool.for_template() for tool in chat.tools.tools] or None,
        add_generation_prompt=chat.add_generation_prompt,
        kwargs=kwargs,
        limit=limit,
        param=chat.wish.prompt_param,
    )


async def plan(service: Service, chat: Conversation) -> Plan:
    """Everything that may refuse the request. Raises ApiError."""
    text, limit = service.ready(chat.model)
    prompt = await prompt_of(text, limit, chat)
    formats = text.formats
    state: ThoughtState = "closed"
    if formats.thought is not None:
        state = formats.thought.state(prompt, text.tokenizer.vocabulary.special)
    constraint = _constraint(chat)
    wish = _with_thought(_with_tools(chat.wish, chat.tools, formats), chat, formats, state, constraint)
    if constraint is not None:
        wish = await constrain(service.grammars, wish, constraint)
    requests = service.admission.requests(text, [prompt], wish)
    readers = [_reader(chat, formats, state, constraint) for _ in requests]
    tally = UsageTally([len(prompt)], wish.n)
    return Plan(text, requests, readers, tally, chat.wish.sampling.stop_token_ids)


def _constraint(chat: Conversation) -> Constraint | None:
    """What the answer must match, of the format asked for and the tools."""
    of_tools = chat.tools.wish() if chat.tools.may_call else None
    given = chat.constraint
    if given is None:
        return None if of_tools is None else Constraint(of_tools, chat.tools.param)
    if not chat.tools.may_call:
        return given
    if chat.tools.choice == "auto" and isinstance(given.wish, grammar.JsonSchema):
        tools = [tool.for_grammar() for tool in chat.tools.tools]
        return Constraint(grammar.JsonOrToolCalls(given.wish.schema, tools, chat.tools.parallel), given.param)
    what = "a tool call that must come" if chat.tools.choice != "auto" else "tools"
    raise invalid(given.param, f"cannot be combined with {what}; set tool_choice to none")


def _with_tools(wish: Wish, use: ToolUse, formats: ChatFormats) -> Wish:
    """Where no call may come, its opening does not; where only one may, its end is the answer's."""
    sampling = wish.sampling
    if use.tools and use.choice == "none" and formats.tool_open is not None:
        bias = {**sampling.logit_bias, formats.tool_open: _NEVER}
        return dataclasses.replace(wish, sampling=msgspec.structs.replace(sampling, logit_bias=bias))
    if not use.may_call or use.parallel or use.wish() is not None:
        return wish
    if formats.tool_close is None:
        message = "false is not supported for this model, whose vocabulary has no token </tool_call>"
        raise invalid("parallel_tool_calls", message)
    stops = (*sampling.stop_token_ids, formats.tool_close)
    return dataclasses.replace(wish, sampling=msgspec.structs.replace(sampling, stop_token_ids=stops))


def _with_thought(
    wish: Wish, chat: Conversation, formats: ChatFormats, state: ThoughtState, constraint: Constraint | None
) -> Wish:
    budget = chat.thought.budget
    if budget and formats.thought is None:
        raise invalid(chat.thought.param, "this model has no thoughts to bound (see --reasoning-parser)")
    if formats.thought is None or state == "closed" or (budget is None and constraint is None):
        return wish
    thinking = formats.thought.thinking(state == "open", budget)
    return dataclasses.replace(wish, sampling=msgspec.structs.replace(wish.sampling, thinking=thinking))


def _reader(
    chat: Conversation, formats: ChatFormats, state: ThoughtState, constraint: Constraint | None
) -> AnswerReader:
    reasoning = None if state == "closed" else ReasoningParser(state == "open")
    tools = None
    if chat.tools.may_call:
        schemas = {tool.name: tool.parameters for tool in chat.tools.tools}
        tools = formats.tool_parser(schemas, is_constrained=constraint is not None)
    return AnswerReader(reasoning, tools, chat.show_reasoning)
