"""Kimi-K3's answers, whose reasoning, text and calls are sections: the tokens that mark them, and the grammar of a
whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeserve.chatformat import section_tags
from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.httpserver.generation.chat.whole_grammar import whole_grammar
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
    """Returns `whole_grammar` for sections. begun: see `Sections.prompt_end`."""
    return whole_grammar(prompt, combined, grammar.Sections(dict(sections.tokens), _name(begun)), _in_tags)


def _name(begun: str) -> str:
    return next((name for name in ("think", "response") if begun.startswith(section_tags.opening(name))), "")


def _in_tags(tools: Sequence[grammar.GrammarTool]) -> list[grammar.GrammarTool]:
    """Returns the tools with their arguments in tags, where their schemas can be enforced so."""
    return [one for tool in tools for one in with_tagged_arguments([tool], tags_say_type=True) or [tool]]
