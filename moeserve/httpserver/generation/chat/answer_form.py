"""Computes how a conversation's tools and reasoning shape its answer: the grammar, the biased and stop tokens, and the
reading of the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from moeserve.chatformat import harmony
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.answer_reading import AnswerReading
from moeserve.httpserver.generation.chat.channels import Channels, channel_grammar
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.sections import Sections, section_grammar
from moeserve.httpserver.generation.chat.solar_tokens import SolarTokens
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.httpserver.generation.chat.thinking_tokens import ThinkingState
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.httpserver.transport.errors import invalid
from moeserve.messages.reasoning import Headers, Thinking

_NEVER: Final = -100.0  # a logit bias that excludes a token


@dataclass(frozen=True, slots=True)
class AnswerForm:
    grammar: GrammarConstraint | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)  # in addition to the client's biases
    thinking: Thinking | None = None
    reasoning: Thinking | Headers | None = None  # the part in which stop strings are ordinary text
    # If the model ends its turn within `reasoning`, the reasoning is ended instead (`EarlyEnd`).
    must_answer: bool = False
    shown_tokens: tuple[int, ...] = ()  # control tokens kept in the text for the format's parser
    stop_token_ids: tuple[int, ...] = ()  # stop tokens of the chat format: the answer is complete after one
    reading: AnswerReading | None = None  # None: the answer is plain text


PLAIN_TEXT: Final = AnswerForm()


def form_of(
    asked: Asked, prompt: ChatPrompt, given: GrammarConstraint | None, text: ModelText, ids: Sequence[int]
) -> AnswerForm:
    """Returns the form for this model. `given` is the grammar that the client asked for, `ids` the prompt's tokens.
    Raises ApiError 400."""
    formats, tools, wanted = text.formats, prompt.tools, prompt.thinking
    if formats.channels is not None:
        begun = formats.channels.prompt_end(text.tokenizer, ids)
        constraint = given
        # The grammar begins at the message's header; otherwise it begins at the message's text.
        if harmony.MESSAGE not in begun:
            constraint = channel_grammar(prompt, _combined(tools, given), formats.channels)
        reading = AnswerReading(prompt, formats, asked.stop_token_ids, constraint, begun=begun)
        return _in_messages(formats.channels, constraint, reading, text, begun)
    if formats.sections is not None:
        begun = formats.sections.prompt_end(text.tokenizer, ids)
        constraint = section_grammar(prompt, _combined(tools, given), formats.sections, begun)
        reading = AnswerReading(prompt, formats, asked.stop_token_ids, constraint, begun=begun)
        return _in_messages(formats.sections, constraint, reading, text, begun)
    if formats.solar is not None:
        begun = formats.solar.prompt_end(text.tokenizer, ids)
        constraint = formats.solar.grammar(prompt, _combined(tools, given), given, begun)
        reading = AnswerReading(prompt, formats, asked.stop_token_ids, constraint, begun=begun)
        return _in_messages(formats.solar, constraint, reading, text, begun)
    state: ThinkingState = "closed"
    if formats.thinking is not None:
        state = formats.thinking.state(ids, text.tokenizer.vocabulary.special)
    constraint = _grammar(tools, given, formats)
    call = _call_tokens(constraint, formats)
    stops = _call_end(tools, constraint, formats)
    reads_effort = wanted.effort is not None and bool(formats.efforts.levels)
    if wanted.budget and formats.thinking is None and not reads_effort:
        raise invalid(wanted.param, "this model has no reasoning to limit (see --reasoning-parser)")
    thinking: Thinking | None = None  # sent to the worker if a budget or a grammar depends on it
    is_asked = wanted.budget is not None or constraint is not None
    if formats.thinking is not None and state != "closed" and is_asked:
        thinking = formats.thinking.message(state == "open", wanted.budget, call)
        _check_ending(asked, wanted.param, thinking, stops)
    reasoning: Thinking | None = None
    if formats.thinking is not None and state != "closed" and prompt.separate_reasoning:
        reasoning = formats.thinking.message(
            state == "open", None, formats.call_opening if tools.may_call else ()
        )
    return AnswerForm(
        constraint,
        logit_bias=_without_calls(tools, formats),
        thinking=thinking,
        reasoning=reasoning,
        # A call in the reasoning whose tag is no token would not be noticed.
        must_answer=constraint is None and bool(formats.call_opening or not tools.may_call),
        shown_tokens=tuple(formats.control_tokens.values()) if tools.may_call else (),
        stop_token_ids=stops,
        reading=AnswerReading(prompt, formats, asked.stop_token_ids, constraint, bool(call), state),
    )


def _in_messages(
    whole: Channels | Sections | SolarTokens,
    constraint: GrammarConstraint | None,
    reading: AnswerReading,
    text: ModelText,
    begun: str,
) -> AnswerForm:
    """Returns the form of an answer whose format covers reasoning, calls and text."""
    separates = whole.separates_reasoning and reading.prompt.separate_reasoning
    return AnswerForm(
        constraint,
        reasoning=whole.reasoning(text.tokenizer, begun) if separates else None,
        must_answer=constraint is None,
        shown_tokens=tuple(whole.tokens.values()),
        reading=reading,
    )


def _grammar(
    tools: ToolUse, given: GrammarConstraint | None, formats: ChatFormats
) -> GrammarConstraint | None:
    """Returns the grammar of the answer, with calls in the model's own format."""
    combined = _combined(tools, given)
    if combined is None and tools.may_call and not tools.parallel and formats.call_end is None:
        combined = GrammarConstraint(tools.any_call(), "parallel_tool_calls")
    if combined is None or formats.call_form is None or not isinstance(combined.spec, grammar.WithCalls):
        return combined
    in_tags = None
    if formats.own_form is not None and formats.own_form.tags is not None:
        in_tags = with_tagged_arguments(combined.spec.tools, bool(formats.own_form.tags.before_json))
    if in_tags is None:
        return dataclasses.replace(combined, spec=replace(combined.spec, form=formats.call_form))
    own_spec = replace(combined.spec, form=formats.own_form, tools=in_tags)
    return dataclasses.replace(combined, spec=own_spec)


def _combined(tools: ToolUse, given: GrammarConstraint | None) -> GrammarConstraint | None:
    """Combines the grammar that the client asked for with the grammar of its tools."""
    of_tools = tools.grammar_spec() if tools.may_call else None
    if given is None:
        return None if of_tools is None else GrammarConstraint(of_tools, tools.param)
    if not tools.may_call:
        return given
    if isinstance(given.spec, grammar.JsonSchema):
        if of_tools is not None and tools.choice != "auto":
            # A call is required, so no text could match `given`.
            return GrammarConstraint(of_tools, tools.param)
        shapes = [tool.for_grammar() for tool in tools.callable]
        either = grammar.JsonOrToolCalls(given.spec.schema, shapes, tools.parallel)
        return dataclasses.replace(given, spec=either)
    what = "a tool call that must come" if tools.choice != "auto" else "tools"
    raise invalid(given.param, f"cannot be combined with {what}; set tool_choice to none")


def _without_calls(tools: ToolUse, formats: ChatFormats) -> dict[int, float]:
    """Returns a logit bias that excludes the opening tag if no call is allowed."""
    is_silent = bool(tools.tools) and tools.choice == "none"
    return {formats.tool_open: _NEVER} if is_silent and formats.tool_open is not None else {}


def _call_end(tools: ToolUse, constraint: GrammarConstraint | None, formats: ChatFormats) -> tuple[int, ...]:
    """Returns the closing tag's token as a stop token if only one call is allowed; () if the tag takes several tokens
    or a grammar ends the answer."""
    is_single = tools.may_call and not tools.parallel
    return (formats.call_end,) if is_single and constraint is None and formats.call_end is not None else ()


def _call_tokens(constraint: GrammarConstraint | None, formats: ChatFormats) -> tuple[int, ...]:
    """Returns the token that begins a call of the grammar and so ends the reasoning. If that token is the second one of
    its tag, the first precedes it. Returns () if no call ends the reasoning."""
    has_calls = constraint is not None and isinstance(constraint.spec, grammar.WithCalls)
    return formats.call_opening if has_calls else ()


def _check_ending(asked: Asked, param: str, thinking: Thinking, format_stops: tuple[int, ...]) -> None:
    """Checks that the request does not forbid the tokens that end reasoning at its budget. `param` is the client's name
    of the budget. Raises ApiError 400."""
    if thinking.budget is None:
        return
    forbidden = {*asked.stop_token_ids, *format_stops}
    first = thinking.budget + (not thinking.is_open)  # position of the ending's first token in the output
    for position, token_id in enumerate(thinking.ending, first):
        if position < asked.min_tokens and token_id in forbidden:
            message = (
                f"no token would be allowed where thinking is cut short after {thinking.budget} tokens: it ends with "
                f"token {token_id}, one of {asked.stop_token_ids_param}, which min_tokens forbids until "
                f"{asked.min_tokens} came"
            )
            raise invalid(param, message)
