"""Conversations, whichever API they came through: their prompt, and what tools and thinking ask of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from moeserve.chatformat import harmony
from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.output import AnswerParser, OutputParser
from moeserve.chatformat.reasoning import ReasoningParser
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.answers import AnswerReader
from moeserve.httpserver.generation.chat.channels import channel_grammar
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.httpserver.generation.request.spec import GenerationSpec, GrammarConstraint
from moeserve.httpserver.generation.request.thinking import ThinkingState, template_effort
from moeserve.httpserver.transport.errors import invalid
from moeserve.messages.sampling import Thinking

_NEVER: Final = -100.0  # a logit bias that excludes a token
_SWITCHES: Final = ("enable_thinking", "thinking")  # templates' variables; the second one is DeepSeek's


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """What the prompt has begun of the answer."""

    thinking: ThinkingState
    message: str = ""  # in channels: as far as the prompt has written it


async def encode(text: ModelText, limit: int, spec: GenerationSpec) -> list[int]:
    """Returns the conversation as token ids, at most about `limit` of them. Raises ApiError 400."""
    return await text.encode_chat(await render(text, limit, spec))


async def render(text: ModelText, limit: int, spec: GenerationSpec) -> list[str]:
    """Returns the conversation as the chat template writes it: see `ModelText.render_chat`. Raises ApiError 400."""
    assert spec.messages is not None
    if spec.tools.may_call and not text.formats.calls_tools:
        message = "this model's chat template shows no way to call tools (see --tool-call-parser)"
        raise invalid(spec.tools.param, message)
    return await text.render_chat(
        spec.messages,
        tools=[tool.for_template() for tool in spec.tools.tools] or None,
        add_generation_prompt=spec.add_generation_prompt,
        continue_final_message=spec.continue_final_message,
        kwargs=_template_kwargs(spec, text.formats),
        limit=limit,
        param=spec.prompt_param,
    )


def _template_kwargs(spec: GenerationSpec, formats: ChatFormats) -> dict[str, Any]:
    kwargs = dict(spec.template_kwargs)
    if formats.channels is not None:
        effort = template_effort(spec.thinking)
        return kwargs if effort is None else {"reasoning_effort": effort} | kwargs
    if spec.thinking.is_enabled is not None:
        kwargs |= dict.fromkeys(_SWITCHES, spec.thinking.is_enabled)
    return kwargs


def resolve(spec: GenerationSpec, text: ModelText, prompt: Sequence[int]) -> PromptEnd:
    """Adds to the spec what its tools and its thinking mean for this model and prompt. Raises ApiError 400."""
    formats = text.formats
    if formats.channels is not None:
        message = formats.channels.prompt_end(text.tokenizer, prompt)
        if harmony.MESSAGE not in message:  # a grammar begins with the message, else with its text
            spec.grammar = channel_grammar(spec, _combined(spec), formats.channels)
        spec.shown_tokens = tuple(formats.channels.tokens.values())
        return PromptEnd("closed", message)
    state: ThinkingState = "closed"
    if formats.thinking is not None:
        state = formats.thinking.state(prompt, text.tokenizer.vocabulary.special)
    spec.grammar = _grammar(spec, formats)
    if spec.tools.may_call:
        spec.shown_tokens = tuple(formats.control_tokens.values())
    _resolve_tools(spec, formats)
    _resolve_thinking(spec, formats, state)
    return PromptEnd(state)


def reader(spec: GenerationSpec, formats: ChatFormats, end: PromptEnd) -> AnswerReader:
    """Returns a reader for one choice of a resolved spec."""
    parser: AnswerParser
    if formats.channels is not None:
        separates = formats.channels.separates_thoughts and spec.separate_reasoning
        parser = HarmonyParser(end.message, spec.tools.may_call, separates)
    else:
        thoughts = None
        if formats.thinking is not None and end.thinking != "closed" and spec.separate_reasoning:
            thoughts = ReasoningParser(end.thinking == "open", formats.thinking.tags)
        parser = _with_tools(spec, formats, thoughts)
    return AnswerReader(
        parser, spec.show_reasoning, end_tags=formats.end_tags, stop_token_ids=spec.stop_token_ids
    )


def _with_tools(spec: GenerationSpec, formats: ChatFormats, thoughts: ReasoningParser | None) -> OutputParser:
    if not spec.tools.may_call or formats.tools is None:
        return OutputParser(thoughts, None)
    schemas = {tool.name: tool.parameters for tool in spec.tools.tools}
    offered = {tool.name for tool in spec.tools.callable}
    constraint = None if spec.grammar is None else spec.grammar.spec
    if constraint is None:
        return OutputParser(thoughts, formats.tools.parser(schemas), offered)
    in_tags = isinstance(constraint, grammar.WithCalls) and constraint.form.tags is not None
    tools = formats.tools.parser(schemas, "own" if in_tags else "json")
    return OutputParser(
        thoughts, tools, offered if _call_token(spec, formats) is not None else (), calls_end_thoughts=True
    )


def _grammar(spec: GenerationSpec, formats: ChatFormats) -> GrammarConstraint | None:
    """Returns the grammar of the answer, its calls in the model's own format."""
    combined = _combined(spec)
    tools = spec.tools
    if combined is None and tools.may_call and not tools.parallel and formats.call_end is None:
        combined = GrammarConstraint(tools.any_call(), "parallel_tool_calls")
    if combined is None or formats.call_form is None or not isinstance(combined.spec, grammar.WithCalls):
        return combined
    in_tags = None if formats.own_form is None else with_tagged_arguments(combined.spec.tools)
    if in_tags is None:
        return GrammarConstraint(replace(combined.spec, form=formats.call_form), combined.param)
    return GrammarConstraint(replace(combined.spec, form=formats.own_form, tools=in_tags), combined.param)


def _combined(spec: GenerationSpec) -> GrammarConstraint | None:
    """Combines the grammar that the client asked for with that of its tools."""
    tools, given = spec.tools, spec.grammar
    of_tools = tools.grammar_spec() if tools.may_call else None
    if given is None:
        return None if of_tools is None else GrammarConstraint(of_tools, tools.param)
    if not tools.may_call:
        return given
    if isinstance(given.spec, grammar.JsonSchema):
        if of_tools is not None and tools.choice != "auto":
            return GrammarConstraint(of_tools, tools.param)  # a call must come, so no text has the format
        shapes = [tool.for_grammar() for tool in tools.callable]
        either = grammar.JsonOrToolCalls(given.spec.schema, shapes, tools.parallel)
        return GrammarConstraint(either, given.param)
    what = "a tool call that must come" if tools.choice != "auto" else "tools"
    raise invalid(given.param, f"cannot be combined with {what}; set tool_choice to none")


def _resolve_tools(spec: GenerationSpec, formats: ChatFormats) -> None:
    """Excludes the opening tag if no call is allowed. If one call is, its closing tag ends the answer, where it is a
    token; else a grammar has seen to it."""
    tools = spec.tools
    if tools.tools and tools.choice == "none" and formats.tool_open is not None:
        spec.logit_bias = {**spec.logit_bias, formats.tool_open: _NEVER}
        return
    if tools.may_call and not tools.parallel and spec.grammar is None and formats.call_end is not None:
        spec.format_stop_token_ids = (formats.call_end,)


def _resolve_thinking(spec: GenerationSpec, formats: ChatFormats, state: ThinkingState) -> None:
    """Names the thinking tokens to the worker where a budget or a grammar depends on them."""
    budget = spec.thinking.budget
    if budget and formats.thinking is None:
        raise invalid(spec.thinking.param, "this model has no thoughts to bound (see --reasoning-parser)")
    if formats.thinking is None or state == "closed" or (budget is None and spec.grammar is None):
        return
    spec.thinking_tokens = formats.thinking.message(state == "open", budget, _call_token(spec, formats))
    _check_ending(spec, spec.thinking_tokens)


def _call_token(spec: GenerationSpec, formats: ChatFormats) -> int | None:
    """Returns the token with which a call of the grammar ends a thought."""
    has_calls = spec.grammar is not None and isinstance(spec.grammar.spec, grammar.WithCalls)
    return formats.tool_open if has_calls else None


def _check_ending(spec: GenerationSpec, thinking: Thinking) -> None:
    """Thinking that is cut short ends with given tokens: they must not be forbidden then. Raises ApiError 400."""
    if thinking.budget is None:
        return
    forbidden = {*spec.stop_token_ids, *spec.format_stop_token_ids}
    first = thinking.budget + (not thinking.is_open)  # the position in the output
    for position, token_id in enumerate(thinking.ending, first):
        if position < spec.min_tokens and token_id in forbidden:
            message = (
                f"no token would be allowed where thinking is cut short after {thinking.budget} tokens: it ends with "
                f"token {token_id}, one of {spec.stop_token_ids_param}, which min_tokens forbids until "
                f"{spec.min_tokens} came"
            )
            raise invalid(spec.thinking.param, message)
