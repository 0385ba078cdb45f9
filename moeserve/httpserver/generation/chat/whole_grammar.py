"""The grammar of an answer whose format covers reasoning, text and calls (Kimi-K3's, Solar Open's)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as with_fields

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.channels import bound_of
from moeserve.httpserver.generation.request.asked import ChatPrompt, GrammarConstraint


def whole_grammar(
    prompt: ChatPrompt,
    combined: GrammarConstraint | None,
    free: grammar.Messages | grammar.Sections,
    written: Callable[[list[grammar.GrammarTool]], list[grammar.GrammarTool]] = list,
) -> GrammarConstraint | None:
    """Returns the grammar of the whole answer. It enforces `combined` and the bound on reasoning, and excludes calls if
    none are allowed. Returns None if every answer is allowed. free: the grammar of any answer. written: gives tools in
    the form in which the model writes their arguments."""
    tools, bound = prompt.tools, bound_of(prompt.thinking)
    if combined is None:
        is_silent = bool(tools.tools) and not tools.may_call
        if bound is None and not is_silent and (tools.parallel or not tools.may_call):
            return None
        any_calls = tools.any_call() if tools.may_call else grammar.TextWithToolCalls([], parallel=True)
        combined = GrammarConstraint(any_calls, tools.param if bound is None else prompt.thinking.param)
    whole = with_fields(free, max_reasoning=bound)
    spec = combined.spec
    match spec:
        case grammar.ToolCalls() | grammar.TextWithToolCalls():
            must_call = isinstance(spec, grammar.ToolCalls)
            whole = with_fields(whole, tools=written(spec.tools), must_call=must_call, parallel=spec.parallel)
        case grammar.JsonOrToolCalls():
            answer = grammar.JsonSchema(spec.schema)
            whole = with_fields(whole, answer=answer, tools=written(spec.tools), parallel=spec.parallel)
        case grammar.JsonSchema() | grammar.Regex() | grammar.Ebnf() | grammar.Choice():
            whole = with_fields(whole, answer=spec)
    return replace(combined, spec=whole)
