"""The reasoning part of an answer, by its tokens, and what follows if the model ends its turn within it."""

from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec


class Thinking(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reasoning part of an answer, for constraints that hold only within it (a token budget) or after it (a
    grammar). The model opens it with the answer's first token, unless the prompt has opened it already."""

    open_token: int  # <think>
    close_token: int  # </think>
    ending: tuple[int, ...]  # tokens that end a reasoning part at its budget; contain close_token once
    is_open: bool  # the prompt ends within the reasoning part
    budget: int | None = None  # reasoning tokens after which `ending` is forced; None: no limit
    # Begins a tool call, which also ends a reasoning part that is not closed.
    call_token: int | None = None
    # The token before `call_token` in the call's first tag; None: `call_token` is the first.
    call_lead: int | None = None


class Headers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reasoning part of an answer that consists of messages (gpt-oss's, Kimi-K3's), each of them with a header."""

    opening: tuple[int, ...]  # tokens that begin a header
    end: int  # the token that ends a header
    mark: tuple[int, ...]  # the header of reasoning, without its `end`
    closing: tuple[int, ...]  # tokens that end a message
    ending: tuple[int, ...]  # tokens that end the reasoning and begin the answer's text
    is_open: bool  # the prompt ends within reasoning
    # Pattern of a header, or its beginning, between `opening` and `end`; other text begins a message whose header lacks
    # its `end`. None: any text belongs to the header.
    header: str | None = None


class EarlyEnd(msgspec.Struct, frozen=True, array_like=True):
    """The tokens with which a model ends its turn. A model that ends it within its reasoning leaves the client with an
    empty answer. Such a token is therefore replaced by the tokens that end the reasoning, and the model answers."""

    reasoning: Thinking | Headers
    token_ids: frozenset[int]

    def ending(self, token_id: int, output: array[int]) -> tuple[int, ...]:
        """Returns the tokens that take the place of this one after `output`; () if it ends the answer."""
        if token_id not in self.token_ids or not is_open_after(self.reasoning, output):
            return ()
        return self.reasoning.ending


def is_open_after(reasoning: Thinking | Headers, output: array[int]) -> bool:
    """Returns whether an answer of these tokens ends within its reasoning. Searches at the speed of C: it is called
    for the last token of each answer."""
    if isinstance(reasoning, Thinking):
        begun = reasoning.is_open or output[:1] == array("i", [reasoning.open_token])
        return begun and reasoning.close_token not in output and not _has_call(reasoning, output)
    backwards = output[::-1]
    at = backwards.index(reasoning.end) if reasoning.end in backwards else len(output)
    later = backwards[:at]
    if any(token_id in later for token_id in (*reasoning.opening, *reasoning.closing)):
        return False
    header = tuple(backwards[at + 1 : at + 1 + len(reasoning.mark)])[::-1]
    return reasoning.is_open if at == len(output) else header == reasoning.mark


def _has_call(reasoning: Thinking, output: array[int]) -> bool:
    call, lead = reasoning.call_token, reasoning.call_lead
    if call is None or call not in output:
        return False
    return lead is None or any(pair == (lead, call) for pair in pairwise(output))
