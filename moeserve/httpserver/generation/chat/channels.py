"""gpt-oss's answers, whose reasoning, calls and texts are messages in channels: the tokens that mark them, and the
grammar of a whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moeserve.chatformat import harmony
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.request.asked import ChatPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.messages.reasoning import Headers
from moeserve.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Channels:
    tokens: Mapping[str, int]  # the format's control tokens, by text
    reads_calls: bool
    separates_reasoning: bool

    def prompt_end(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> str:
        """Returns the beginning of a message that the prompt's end leaves for the answer to continue; "" if there is
        none."""
        start = self.tokens[harmony.START]
        for at in range(len(prompt) - 1, -1, -1):
            if prompt[at] == start:
                return tokenizer.decode(prompt[at:], skip_special=False)
        return ""

    def reasoning(self, tokenizer: TextTokenizer, begun: str) -> Headers:
        """Returns the tokens around reasoning. begun: see `prompt_end`."""
        tokens = self.tokens
        return Headers(
            opening=(tokens[harmony.START], tokens[harmony.CHANNEL]),
            end=tokens[harmony.MESSAGE],
            mark=tuple(tokenizer.encode_rest(harmony.CHANNEL + harmony.ANALYSIS)),
            closing=(tokens[harmony.END], tokens[harmony.CALL], tokens[harmony.RETURN]),
            ending=tuple(tokenizer.encode_rest(harmony.ANSWER_FOLLOWS)),
            is_open=harmony.HarmonyParser(begun, reads_calls=False).is_thinking,
            header=harmony.HEADER_PART,
        )


def channel_grammar(
    prompt: ChatPrompt, combined: GrammarConstraint | None, channels: Channels
) -> GrammarConstraint | None:
    """Returns the grammar of the answer's messages. It enforces `combined` and the bound on reasoning, and excludes
    calls if none are allowed. Returns None if every message is allowed."""
    tools, thinking = prompt.tools, prompt.thinking
    bound = bound_of(thinking)
    if combined is None:
        is_silent = bool(tools.tools) and not tools.may_call
        if bound is None and not is_silent:
            return None
        any_calls = tools.any_call().tools if tools.may_call else []
        param = tools.param if bound is None else thinking.param
        return GrammarConstraint(
            grammar.Channels(dict(channels.tokens), None, any_calls, False, bound), param
        )
    answer: grammar.AnswerSpec | None = None
    shapes: list[grammar.GrammarTool] = []
    must_call = False
    match combined.spec:
        case grammar.ToolCalls():
            shapes, must_call = combined.spec.tools, True
        case grammar.TextWithToolCalls():
            shapes = combined.spec.tools
        case grammar.JsonOrToolCalls():
            answer, shapes = grammar.JsonSchema(combined.spec.schema), combined.spec.tools
        case grammar.JsonSchema() | grammar.Regex() | grammar.Ebnf() | grammar.Choice():
            answer = combined.spec
    whole = grammar.Channels(dict(channels.tokens), answer, shapes, must_call, bound)
    return replace(combined, spec=whole)


def bound_of(thinking: ThinkingOptions) -> int | None:
    """Returns the most reasoning tokens; None: no bound. Efforts other than "none" set no bound: the template tells the
    model about them."""
    return thinking.budget if thinking.effort in (None, "none") else None
