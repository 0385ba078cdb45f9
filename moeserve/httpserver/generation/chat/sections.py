"""Kimi-K3's answers, whose reasoning, text and calls are sections: the tokens that mark them, and the grammar of a
whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as with_fields

from moeserve.chatformat import section_tags
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.channels import bound_of
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.httpserver.generation.request.asked import ChatPrompt, GrammarConstraint
from moeserve.messages.reasoning import Headers
from moeserve.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Sections:
    tokens: Mapping[str, int]  # the format's control tokens, by text
    reads_calls: bool
    separates_reasoning: bool

    def prompt_end(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> str:
        """Returns the section that the prompt's end leaves for the answer to continue, from its opening tag on; "" if
        there is none."""
        for at in range(len(prompt) - 1, -1, -1):
            if prompt[at] == self.tokens[section_tags.END]:
                return ""
            if prompt[at] == self.tokens[section_tags.OPEN]:
                return tokenizer.decode(prompt[at:], skip_special=False)
        return ""

    def reasoning(self, tokenizer: TextTokenizer, begun: str) -> Headers:
        """Returns the tokens around reasoning. begun: see `prompt_end`."""
        opening, close = section_tags.opening("think"), section_tags.closing("think")
        return Headers(
            opening=(self.tokens[section_tags.OPEN], self.tokens[section_tags.CLOSE]),
            end=self.tokens[section_tags.SEP],
            mark=tuple(tokenizer.encode_rest(opening.removesuffix(section_tags.SEP))),
            closing=(self.tokens[section_tags.END],),
            ending=tuple(tokenizer.encode_rest(close + section_tags.opening("response"))),
            is_open=_name(begun) == "think",
        )


def section_grammar(
    prompt: ChatPrompt, combined: GrammarConstraint | None, sections: Sections, begun: str
) -> GrammarConstraint | None:
    """Returns the grammar of the answer's sections. It enforces `combined` and the bound on reasoning, and excludes
    calls if none are allowed. begun: see `Sections.prompt_end`. Returns None if every answer is allowed."""
    tools, bound = prompt.tools, bound_of(prompt.thinking)
    if combined is None:
        is_silent = bool(tools.tools) and not tools.may_call
        if bound is None and not is_silent and (tools.parallel or not tools.may_call):
            return None
        any_calls = tools.any_call() if tools.may_call else grammar.TextWithToolCalls([], parallel=True)
        combined = GrammarConstraint(any_calls, tools.param if bound is None else prompt.thinking.param)
    whole = grammar.Sections(dict(sections.tokens), _name(begun), max_reasoning=bound)
    spec = combined.spec
    match spec:
        case grammar.ToolCalls() | grammar.TextWithToolCalls():
            must_call = isinstance(spec, grammar.ToolCalls)
            whole = with_fields(
                whole, tools=_in_tags(spec.tools), must_call=must_call, parallel=spec.parallel
            )
        case grammar.JsonOrToolCalls():
            answer = grammar.JsonSchema(spec.schema)
            whole = with_fields(whole, answer=answer, tools=_in_tags(spec.tools), parallel=spec.parallel)
        case grammar.JsonSchema() | grammar.Regex() | grammar.Ebnf() | grammar.Choice():
            whole = with_fields(whole, answer=spec)
    return replace(combined, spec=whole)


def _name(begun: str) -> str:
    return next((name for name in ("think", "response") if begun.startswith(section_tags.opening(name))), "")


def _in_tags(tools: Sequence[grammar.GrammarTool]) -> list[grammar.GrammarTool]:
    """Returns the tools with their arguments in tags, where their schemas can be enforced so."""
    return [one for tool in tools for one in with_tagged_arguments([tool], tags_say_type=True) or [tool]]
