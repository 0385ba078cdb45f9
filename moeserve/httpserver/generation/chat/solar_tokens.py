"""Solar Open's answers, whose reasoning, text and calls are messages: the tokens that mark them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeserve.chatformat import solar_open
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.template_efforts import SWITCHES
from moeserve.httpserver.generation.chat.whole_grammar import whole_grammar
from moeserve.httpserver.generation.request.asked import ChatPrompt, GrammarConstraint
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.messages.reasoning import Thinking
from moeserve.tokenizer.text_tokenizer import TextTokenizer


def without_budget(options: ThinkingOptions, kwargs: Mapping[str, Any]) -> ThinkingOptions:
    """Returns the options from which the template's word for the effort is chosen, without a budget in tokens: the
    template's words for little effort mean no reasoning, so no word stands for a small budget. kwargs: the client's
    variables of the template; its `enable_thinking` false switches reasoning off, because the template does not read
    it."""
    if kwargs.get(SWITCHES[0]) is False:
        return ThinkingOptions(is_enabled=False)
    return replace(options, budget=None)


@dataclass(frozen=True)
class SolarTokens:
    tokens: Mapping[str, int]  # the format's control tokens, by text
    reads_calls: bool
    separates_reasoning: bool

    @property
    def end_tags(self) -> dict[int, str]:
        """Returns the tokens that may end an answer, with their texts."""
        return {self.tokens[word]: word for word in (solar_open.CALLS, solar_open.FLUSH)}

    def prompt_end(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> str:
        """Returns the message that the prompt's end leaves for the answer to continue; "" if there is none."""
        for at in range(len(prompt) - 1, -1, -1):
            if prompt[at] == self.tokens[solar_open.BEGIN]:
                return tokenizer.decode(prompt[at:], skip_special=False)
        return ""

    def reasoning(self, tokenizer: TextTokenizer, begun: str) -> Thinking:
        """Returns the tokens around reasoning. begun: see `prompt_end`."""
        return Thinking(
            self.tokens[solar_open.THINK],
            self.tokens[solar_open.END],
            tuple(tokenizer.encode_rest(solar_open.ANSWER_FOLLOWS)),
            is_open=solar_open.SolarMessages(begun).is_thinking,
            call_token=self.tokens[solar_open.TOOL_CALLS],
        )

    def grammar(
        self,
        prompt: ChatPrompt,
        combined: GrammarConstraint | None,
        given: GrammarConstraint | None,
        begun: str,
    ) -> GrammarConstraint | None:
        """Returns the grammar of the answer's messages; `given`, which the client asked for, if the prompt has begun a
        message's text."""
        if solar_open.CONTENT in begun:
            return given
        kind = "think" if solar_open.SolarMessages(begun).is_thinking else ""
        return whole_grammar(prompt, combined, grammar.Messages(dict(self.tokens), kind))
